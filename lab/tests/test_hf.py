"""lab/hf.py: its help. What its verbs do is in test_to_hf.py and test_from_hf.py."""
import subprocess
import sys

import pytest

from tests.helpers import TOP

# what only lab/requirements.txt has, and what that brings
MISSING = ("transformers", "tokenizers", "safetensors", "gguf", "accelerate", "lm_eval")


@pytest.mark.parametrize("argv", [["--help"], ["to", "--help"], ["from", "--help"]])
def test_help_needs_requirements_txt_alone(argv):
    code = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))"  # an import of None fails
    code += f"; from lab import hf; hf.main({argv})"
    run = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True)
    assert run.returncode == 0 and "python -m lab.hf" in run.stdout
