"""Small models for the tests of lab/hf.py, ours and theirs, and its refusals."""
import pytest
import torch
import transformers

from data import EOT, get_tokenizer
from lab import hf
from lab.to_hf import convert_tokenizer
from model import GPT, GPTConfig

BYTES = get_tokenizer("bytes")
TRUST = dict(trust_remote_code=True)
ODD = f"Hi  to,\n\n\tthe string naïve costs 1234 €. It's 日本語 🙂\x00\x7f{EOT}"
TINY = dict(  # four heads of queries share one of keys
    vocab_size=257, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0),
)


def moved(model):
    """The model, each of whose parameters has moved to a value of its own."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape)
    return model.eval()


def save_ours(attn, **settings):
    model = moved(GPT(GPTConfig(attn, 2, 4, 32, block_size=64, vocab_size=257, **settings)))
    model.save("ckpt.pt", tokenizer="bytes")
    return model


def save_theirs(kind="Llama", **changes):
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = moved(getattr(transformers, f"{kind}ForCausalLM")(config))
    model.save_pretrained("theirs")
    convert_tokenizer(BYTES).save_pretrained("theirs")
    return model


def save_gguf(eps=1e-5, scaling=False, without=None):
    """theirs.gguf: a Llama of one layer in the format of llama.cpp."""
    gguf = pytest.importorskip("gguf", reason="needs lab/requirements.txt")
    pytest.importorskip("accelerate", reason="needs lab/requirements.txt")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    file = gguf.GGUFWriter("theirs.gguf", "llama")
    file.add_block_count(1)
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_feed_forward_length(64)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_rope_dimension_count(8)
    file.add_layer_norm_rms_eps(eps)
    if scaling:
        file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    letters = [bytes_to_unicode()[byte] for byte in range(256)]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list([*letters, "ĠĠ", EOT])
    file.add_token_types([1] * 257 + [3])  # 3: of no text
    file.add_token_merges(["Ġ Ġ"])
    file.add_eos_token_id(257)
    shapes = {
        "token_embd": (258, 32), "output_norm": (32,),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }
    torch.manual_seed(0)
    for name, shape in shapes.items():
        if name != without:
            file.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def refusal(*argv):
    with pytest.raises(SystemExit) as error:  # a traceback fails the test
        hf.main(argv)
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code
