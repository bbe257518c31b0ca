"""
A checkpoint of any arm in EleutherAI's evaluation harness, which downloads the data of its tasks.

$ python -m lab.lm_eval --ckpt=out/gpt2/diff --tasks=hellaswag,piqa

A context that is too long loses its beginning. New tokens are always the likeliest.
"""
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from lm_eval import simple_evaluate, tasks, utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data import get_tokenizer
from lab.stats import load_checkpoint
from model import upcast


@dataclass
class Config:
    ckpt: Path | None = None  # file, or folder of a run (the newest below out/)
    tasks: str = "hellaswag"  # the harness's names, a list like a,b,c
    include_path: str | None = None  # a folder with tasks of your own
    limit: int | None = None  # questions of each task, for a first try (all)
    batch_size: int = 16  # texts at a time
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class HarnessModel(TemplateLM):
    """A checkpoint that GPT.load has opened, in the precision in which it was trained."""

    def __init__(self, model, batch_size=16):
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.enc = get_tokenizer(model.extra["tokenizer"])
        self.ends = model.extra.get("ends", [self.enc.eot_token])  # a pretrained model has others
        self._device = model.wte.weight.device  # what the harness calls device
        bf16 = model.extra.get("log", [{}])[0].get("dtype") == "bfloat16"
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    eot_token_id = property(lambda self: self.enc.eot_token)

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.enc.encode_ordinary(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """[(log p of the continuation, whether all its tokens are the likeliest)] of requests, each
        (anything, tokens of the context, tokens of the continuation)."""
        block = self.model.config.block_size
        found = [(0.0, True)] * len(requests)
        work = []  # (tokens, n, number of the request): the last n tokens are to be predicted
        for number, (_, context, continuation) in enumerate(requests):
            # a piece of a long continuation stands behind as many tokens as there is room for
            for start in range(0, len(continuation), block):
                tokens = context + continuation[: start + block]
                n = min(block, len(continuation) - start)
                work.append((tokens[-(block + 1) :], n, number))  # the model does not read the last
        work.sort(key=lambda item: -len(item[0]))  # texts of one length together, the longest first
        for start in tqdm(range(0, len(work), self.batch_size), disable=disable_tqdm):
            batch = work[start : start + self.batch_size]
            for (_, _, number), (log_p, is_greedy) in zip(batch, self.score(batch)):
                found[number] = (found[number][0] + log_p, found[number][1] and is_greedy)
        return found

    @torch.inference_mode()
    def score(self, batch):
        """(log p of its last n tokens, whether all are the likeliest) for each (tokens, n, _)."""
        rows = [torch.tensor(tokens) for tokens, _, _ in batch]
        idx = pad_sequence(rows, batch_first=True).to(self.device)  # no token sees its padding
        with self.autocast:
            logits, _ = self.model(idx[:, :-1], idx[:, 1:])  # (B, T, vocab_size)
        found = []
        for row, (tokens, n, _) in enumerate(batch):
            end = len(tokens) - 1
            log_p = upcast(logits[row, end - n : end]).log_softmax(-1)  # (n, vocab_size)
            targets = idx[row, end - n + 1 : end + 1, None]  # (n, 1)
            is_greedy = (log_p.argmax(-1, keepdim=True) == targets).all().item()
            found.append((log_p.gather(-1, targets).sum().item(), is_greedy))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, behind <|endoftext|>."""
        asked = [(None, [self.eot_token_id], self.tok_encode(one.args[0])) for one in requests]
        return [log_p for log_p, _ in self._loglikelihood_tokens(asked, disable_tqdm)]

    def generate_until(self, requests, disable_tqdm=False):
        """The text that follows each context, up to the first of its stop strings."""
        texts = []
        for request in tqdm(requests, disable=disable_tqdm):
            options = normalize_gen_kwargs(request.args[1])
            tokens = self.tok_encode(request.args[0]) or [self.eot_token_id]
            idx = torch.tensor([tokens], device=self.device)
            stops = [stop for stop in options["until"] if stop]
            made = []
            text = ""
            with self.autocast:
                for token in self.model.generate(idx, options["max_gen_toks"], temperature=0):
                    if token.item() in self.ends or any(stop in text for stop in stops):
                        break
                    made.append(token.item())
                    text = self.enc.decode(made)
            for stop in stops:
                text = text.partition(stop)[0]
            texts.append(text)
        return texts


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv)
    manager = tasks.TaskManager(include_path=config.include_path)
    path, model = load_checkpoint(config.ckpt, config.device)
    asked = HarnessModel(model, config.batch_size)
    names = config.tasks.split(",")
    found = simple_evaluate(asked, tasks=names, limit=config.limit, task_manager=manager)
    print(f"{path}: {model.config.attn}\n{utils.make_table(found)}")


if __name__ == "__main__":
    main()
