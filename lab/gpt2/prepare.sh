#!/usr/bin/env bash
# Fills out/gpt2-pack, a folder that travels to a machine with a GPU, PyTorch, and no network.
# In the project's root, on a machine with requirements.txt, without a GPU:
#
#     bash lab/gpt2/prepare.sh DOCUMENTS
#
# DOCUMENTS is a folder with train-textbooks, train-novels, val-textbooks and val-novels.jsonl.xz,
# whose lines are {"text": ...}. PYTHON is the version of Python on the other machine.
set -euo pipefail
documents=${1:?which folder has the documents?}
PYTHON=${PYTHON:-3.12}
pack=out/gpt2-pack
mkdir -p $pack/wheels

# GPT-2's vocabulary. tiktoken downloads it to this folder, unless it is there already
if [ -n "${TIKTOKEN_CACHE_DIR:-}" ]; then
  cp -rT --no-preserve=mode "$TIKTOKEN_CACHE_DIR" $pack/tiktoken
fi
export TIKTOKEN_CACHE_DIR=$PWD/$pack/tiktoken
python lab/gpt2/pack.py pack "$documents" $pack

# what train.py needs beside torch and numpy. (tiktoken imports requests only for a download)
python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$PYTHON" \
  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
  --dest $pack/wheels tiktoken==0.14.0 tyro==1.0.17 \
  regex docstring-parser typeguard typing-extensions

du -ch $pack/* $(git ls-files) | tail -n 1  # what travels, with the project itself
