"""
Does this PyTorch still need model.OneLayout? Without it, do the gradients of attention depend on
how the output's gradient lies in memory?

$ python -m lab.gpt2.layout
"""
import torch

import model


def difference():
    """In its second call cuDNN may use the plan that it made for another layout in the first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 256, 64).to(device, torch.bfloat16)
    rope = model.make_rope(model.GPTConfig(), 256, device, q.dtype)
    dy = torch.randn(2, 256, 4, 64).to(device, torch.bfloat16).transpose(1, 2)
    gradients = []
    for layout in (dy, dy.contiguous()):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = model.softmax_attention(*inputs, rope)
        gradients.append(torch.autograd.grad(y, inputs, layout))
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(*gradients))


print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: with OneLayout the "
      f"gradients differ by {difference():.1e}")
model.OneLayout.apply = staticmethod(lambda y: y)
print(f"without it they differ by {difference():.1e}")
