"""Our checkpoints in other libraries, which only this folder needs: see requirements-extra.txt."""
import sys
from importlib.util import find_spec

for name in ("lm_eval", "transformers"):
    if find_spec(name) is None:
        sys.exit(f"integrations: {name} is missing, pip install -r requirements-extra.txt has it")
