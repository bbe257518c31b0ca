"""
A checkpoint of any arm in EleutherAI's evaluation harness.

The tasks of the paper's Table 1:
$ python -m lab.lm_eval --ckpt=out/gpt2/diff \\
    --tasks=arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande

It needs the package lm_eval, see lab/requirements.txt, and the harness downloads the data of a task
when it is first run.
"""
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from common import UserError, cli, count, find_checkpoint, flag, parse_flags, pick_device
from data import get_tokenizer
from lab import report
from model import GPT, upcast

try:
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError:
    TemplateLM = object  # main says what is missing


@dataclass
class Config:
    """What to evaluate, and on what. Each field is a flag."""

    ckpt: Path | None = flag(None, "checkpoint, or the folder of a run (the newest one under out/)")
    tasks: str = flag("hellaswag", "the harness's names, one or a list like a,b,c")
    include_path: str | None = flag(None, "a folder with tasks of your own")
    num_fewshot: int | None = flag(
        None, "examples before a question (the task's own)", type=count
    )
    limit: int | None = flag(None, "questions of each task, for a first try (all)")
    batch_size: int = flag(16, "texts at a time")
    device: str | None = flag(None, "cuda, cuda:1, cpu or mps (cuda where there is one, else cpu)")


class HarnessModel(TemplateLM):
    """A GPT that the harness can ask. enc: its tokenizer. dtype: of its matmuls, as in training."""

    def __init__(self, model, enc, dtype="float32", batch_size=16):
        super().__init__()
        self.model = model
        self.enc = enc
        self.batch_size = batch_size
        self._device = model.wte.weight.device  # what the harness calls device
        self.autocast = torch.autocast(
            self.device.type, torch.bfloat16, enabled=dtype == "bfloat16"
        )

    @property
    def eot_token_id(self):
        return self.enc.eot_token

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.enc.encode_ordinary(string)

    def pieces(self, context, continuation):
        """(tokens, n): the last n tokens are to be predicted, and no token is predicted twice.

        A context that is too long loses its beginning. A continuation longer than a block comes in
        several pieces, each behind as many tokens as the block has room for.
        """
        block = self.model.config.block_size
        for start in range(0, len(continuation), block):
            piece = continuation[start : start + block]
            tokens = context + continuation[:start] + piece
            yield tokens[-(block + 1) :], len(piece)  # the model reads all but the last token

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """[(log-likelihood of the continuation, whether each of its tokens is the likeliest)]

        requests: [(anything, tokens of the context, tokens of the continuation)]
        """
        work = []  # (tokens, n, number of the request)
        for number, (_, context, continuation) in enumerate(requests):
            for tokens, n in self.pieces(context, continuation):
                work.append((tokens, n, number))
        work.sort(key=lambda item: -len(item[0]))  # texts of one length together, the longest first

        total = [0.0] * len(requests)
        greedy = [True] * len(requests)
        for start in tqdm(range(0, len(work), self.batch_size), disable=disable_tqdm):
            batch = work[start : start + self.batch_size]
            found = self.score([(tokens, n) for tokens, n, _ in batch])
            for (_, _, number), (log_p, likeliest) in zip(batch, found):
                total[number] += log_p
                greedy[number] &= likeliest
        return list(zip(total, greedy))

    @torch.inference_mode()
    def score(self, batch):
        """(log p of its last n tokens, whether all are the likeliest) for each (tokens, n)."""
        longest = len(batch[0][0])
        idx = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, (tokens, _) in enumerate(batch):
            idx[row, : len(tokens)] = torch.tensor(tokens)  # no token sees the zeros behind it
        idx = idx.to(self.device)
        with self.autocast:
            x = self.model.read(idx[:, :-1])  # (B, T, C)
            found = []
            for row, (tokens, n) in enumerate(batch):
                end = len(tokens) - 1
                logits = self.model.logits(x[row, end - n : end])  # (n, vocab_size)
                targets = idx[row, end - n + 1 : end + 1, None]  # (n, 1)
                log_p = upcast(logits).log_softmax(-1).gather(-1, targets).sum().item()
                likeliest = (logits.argmax(-1, keepdim=True) == targets).all().item()
                found.append((log_p, likeliest))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, behind <|endoftext|>."""
        texts = [request.args[0] for request in requests]
        asked = [(None, [self.eot_token_id], self.tok_encode(text)) for text in texts]
        return [log_p for log_p, _ in self._loglikelihood_tokens(asked, disable_tqdm)]

    def generate_until(self, requests, disable_tqdm=False):
        """The text that follows each context, up to the first of its stop strings."""
        from lm_eval.models.utils import normalize_gen_kwargs

        made = []
        for request in tqdm(requests, disable=disable_tqdm):
            context, options = request.args
            made.append(self.continue_text(context, normalize_gen_kwargs(options)))
        return made

    def continue_text(self, context, options):
        tokens = self.tok_encode(context) or [self.eot_token_id]
        idx = torch.tensor([tokens], device=self.device)
        # the harness is greedy where a task does not say, and 0 or -1 for top_k means all tokens
        choose = {"temperature": float(options.get("temperature", 0))}
        if choose["temperature"] > 0:
            choose["top_p"] = options.get("top_p")
            if (options.get("top_k") or 0) > 0:
                choose["top_k"] = options["top_k"]
        made = []
        with self.autocast:
            for token in self.model.generate(idx, options["max_gen_toks"], **choose):
                if token.item() == self.eot_token_id:
                    break
                made.append(token.item())
                text = self.enc.decode(made)
                ends = [text.find(stop) for stop in options["until"] if stop and stop in text]
                if ends:
                    return text[: min(ends)]
        return self.enc.decode(made)


def load(path, device, batch_size=16):
    """The HarnessModel of a checkpoint, in the precision in which it was trained."""
    model = GPT.load(path, device, kernel="sdpa")
    dtype = model.extra.get("run", {}).get("dtype", "float32")
    return HarnessModel(model, get_tokenizer(model.extra.get("tokenizer")), dtype, batch_size)


def main(argv=None):
    """Prints the harness's table. Raises UserError, ModelError and OSError as sample.py does."""
    config = Config(**parse_flags(Config, argv, __doc__))
    report.need("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    path = find_checkpoint(config.ckpt)
    manager = TaskManager(include_path=config.include_path)
    tasks = config.tasks.split(",")
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        what = ", ".join(unknown)
        raise UserError(f"the harness knows no task {what}: `lm-eval ls tasks` lists them")
    model = load(path, pick_device(config.device), config.batch_size)
    found = simple_evaluate(
        model,
        tasks=tasks,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        task_manager=manager,
    )
    print(f"{path}: {model.model.config.attn}, step {model.model.extra.get('step')}")
    print(make_table(found))


if __name__ == "__main__":
    cli(main)
