"""
A checkpoint of any arm in EleutherAI's evaluation harness, which downloads the data of its tasks.

$ python -m lab.lm_eval --ckpt=out/gpt2/diff --tasks=hellaswag,piqa
"""
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
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
    ckpt: Path | None = flag(None, "checkpoint, or the folder of a run (the newest one under out/)")
    tasks: str = flag("hellaswag", "the harness's names, one or a list like a,b,c")
    include_path: str | None = flag(None, "a folder with tasks of your own")
    num_fewshot: int | None = flag(None, "examples before a question (the task's own)", type=count)
    limit: int | None = flag(None, "questions of each task, for a first try (all)")
    batch_size: int = flag(16, "texts at a time")
    device: str | None = flag(None, "cuda, cuda:1, cpu or mps (cuda where there is one, else cpu)")


class HarnessModel(TemplateLM):
    """A checkpoint that GPT.load has opened, in the precision in which it was trained."""

    def __init__(self, model, batch_size=16):
        super().__init__()
        self.model = model
        self.enc = get_tokenizer(model.extra.get("tokenizer"))
        self.batch_size = batch_size
        self._device = model.wte.weight.device  # what the harness calls device
        bf16 = model.extra.get("run", {}).get("dtype") == "bfloat16"
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    @property
    def eot_token_id(self):
        return self.enc.eot_token

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.enc.encode_ordinary(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """[(log-likelihood of the continuation, whether each of its tokens is the likeliest)]

        requests: [(anything, tokens of the context, tokens of the continuation)]
        """
        block = self.model.config.block_size
        total = [0.0] * len(requests)
        greedy = [True] * len(requests)
        work = []  # (tokens, n, number of the request): the last n tokens are to be predicted
        for number, (_, context, continuation) in enumerate(requests):
            # a piece of a long continuation stands behind as many tokens as there is room for
            for start in range(0, len(continuation), block):
                piece = continuation[start : start + block]
                tokens = context + continuation[:start] + piece
                # the model reads all but the last token
                work.append((tokens[-(block + 1) :], len(piece), number))
        work.sort(key=lambda item: -len(item[0]))  # texts of one length together, the longest first
        for start in tqdm(range(0, len(work), self.batch_size), disable=disable_tqdm):
            batch = work[start : start + self.batch_size]
            for (_, _, number), (log_p, likeliest) in zip(batch, self.score(batch)):
                total[number] += log_p
                greedy[number] &= likeliest
        return list(zip(total, greedy))

    @torch.inference_mode()
    def score(self, batch):
        """(log p of its last n tokens, whether all are the likeliest) for each (tokens, n, _)."""
        rows = [torch.tensor(tokens) for tokens, _, _ in batch]
        idx = pad_sequence(rows, batch_first=True).to(self.device)  # no token sees its padding
        with self.autocast:
            x = self.model.read(idx[:, :-1])  # (B, T, C)
            found = []
            for row, (tokens, n, _) in enumerate(batch):
                end = len(tokens) - 1
                logits = self.model.logits(x[row, end - n : end])  # (n, vocab_size)
                targets = idx[row, end - n + 1 : end + 1, None]  # (n, 1)
                log_p = upcast(logits).log_softmax(-1).gather(-1, targets).sum().item()
                likeliest = (logits.argmax(-1, keepdim=True) == targets).all().item()
                found.append((log_p, likeliest))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-likelihood of each whole text, behind <|endoftext|>."""
        start = [self.eot_token_id]
        asked = [(None, start, self.tok_encode(request.args[0])) for request in requests]
        return [log_p for log_p, _ in self._loglikelihood_tokens(asked, disable_tqdm)]

    def generate_until(self, requests, disable_tqdm=False):
        """The text that follows each context, up to the first of its stop strings."""
        requests = tqdm(requests, disable=disable_tqdm)
        return [self.continue_text(*request.args) for request in requests]

    def continue_text(self, context, options):
        from lm_eval.models.utils import normalize_gen_kwargs

        options = normalize_gen_kwargs(options)
        tokens = self.tok_encode(context) or [self.eot_token_id]
        idx = torch.tensor([tokens], device=self.device)
        choose = {"temperature": float(options.get("temperature", 0))}  # 0: a task does not say
        for name in ("top_k", "top_p"):
            if options.get(name, 0) > 0:  # 0 and -1 mean all tokens
                choose[name] = options[name]
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


def main(argv=None):
    config = Config(**parse_flags(Config, argv, __doc__))
    report.need("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    path = find_checkpoint(config.ckpt)
    manager = TaskManager(include_path=config.include_path)
    tasks = config.tasks.split(",")
    unknown = ", ".join(task for task in tasks if task not in manager.all_tasks)
    if unknown:
        raise UserError(f"the harness knows no task {unknown}: `lm-eval ls tasks` lists them")
    model = GPT.load(path, pick_device(config.device), kernel="sdpa")
    options = dict(num_fewshot=config.num_fewshot, limit=config.limit, task_manager=manager)
    found = simple_evaluate(HarnessModel(model, config.batch_size), tasks=tasks, **options)
    print(f"{path}: {model.config.attn}, step {model.extra.get('step')}")
    print(make_table(found))


if __name__ == "__main__":
    cli(main)
