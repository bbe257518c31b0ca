"""What is wrong with my port of differential attention? See port/README.md."""
from port.verdict import Verdict, diagnose

__all__ = ["Verdict", "diagnose"]
