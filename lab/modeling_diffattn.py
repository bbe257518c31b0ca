"""
A GPT of model.py in the clothes of transformers.

lab/hf.py copies this file and model.py into a folder, in which transformers finds both.
"""
import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .model import GPT, GPTConfig


class DiffAttnConfig(PretrainedConfig):
    """gpt: the fields of a GPTConfig, of which transformers reads some under names of its own."""

    model_type = "diffattn"

    def __init__(self, gpt=None, **kwargs):
        super().__init__(**kwargs)
        self.gpt = gpt or {}
        config = GPTConfig(**self.gpt)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.n_embd
        self.num_hidden_layers = config.n_layer
        self.num_attention_heads = config.n_head
        self.max_position_embeddings = config.block_size


class DiffAttnForCausalLM(PreTrainedModel, GenerationMixin):
    """There is no cache: generate() reads the whole text anew for each token."""

    config_class = DiffAttnConfig
    accepts_loss_kwargs = False  # so Trainer itself divides by the steps that it accumulates

    def __init__(self, config):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**config.gpt))
        self.post_init()

    def _init_weights(self, module):
        pass  # GPT has drawn them

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        """The logits are (B, T, vocab_size). Only the loss has a gradient."""
        if attention_mask is None or attention_mask[:, 0].all():  # later tokens can't be seen
            if labels is None:
                return CausalLMOutput(logits=self.gpt(input_ids, input_ids)[0])
            targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # a target of -100 does not count
            logits, loss = self.gpt(input_ids, targets)
            return CausalLMOutput(loss=loss, logits=logits)
        if labels is not None:
            raise ValueError("a batch with labels must have its padding on the right")
        # no arm can pass over padding on the left, so each text is read alone and without it
        logits = []
        for tokens, is_text in zip(input_ids, attention_mask.bool()):
            tokens = tokens[is_text][None]
            of_text, _ = self.gpt(tokens, tokens)
            logits.append(F.pad(of_text[0], (0, 0, len(is_text) - len(of_text[0]), 0)))
        return CausalLMOutput(logits=torch.stack(logits))

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        return dict(input_ids=input_ids, attention_mask=attention_mask)
