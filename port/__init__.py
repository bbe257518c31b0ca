"""What is wrong with my port of differential attention? See port/README.md."""

__all__ = ["Verdict", "diagnose"]


def __getattr__(name):
    """`from port import diagnose` imports torch only here, so that --help works without torch."""
    if name in __all__:
        from port import verdict
        return getattr(verdict, name)
    raise AttributeError(f"module 'port' has no attribute {name!r}")
