"""Mamba of `transformers` with schedsearch's convolutions in place of its own, with random weights.

    python examples/pytorch/mamba.py
    python examples/pytorch/mamba.py --device cuda --hidden 2048 --layers 4 --tokens 2048

It compares logits, gradients and generated tokens of the model with and without them, and prints the times of both. The
models of `transformers` call two functions of their module, `causal_conv1d_fn` and `causal_conv1d_update`, with the
arguments of the package causal-conv1d: `convolutions_in` puts ours there, for Mamba and for others that call them.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import schedsearch.torch as sst

_ROUNDS = 5


@contextlib.contextmanager
def convolutions_in(module: Any) -> Iterator[None]:
    """Lets the models of a module of `transformers`, such as modeling_mamba, use our convolutions inside the block."""
    before = module.causal_conv1d_fn, module.causal_conv1d_update
    module.causal_conv1d_fn, module.causal_conv1d_update = sst.causal_conv1d, sst.causal_conv1d_update
    try:
        yield
    finally:
        module.causal_conv1d_fn, module.causal_conv1d_update = before


def model_of(hidden: int, layers: int, device: str, dtype: torch.dtype) -> Any:
    """A Mamba with random weights."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=256, hidden_size=hidden, num_hidden_layers=layers, state_size=16, use_cache=True)
    return MambaForCausalLM(config).to(device, dtype).eval()


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of a step of training, by name of the parameter."""
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest magnitude."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-20))


def compared(model: Any, tokens: torch.Tensor, new: int) -> dict[str, Any]:
    """What differs with our convolutions: of the logits, of the gradients, and whether the same tokens follow."""
    import transformers.models.mamba.modeling_mamba as modeling

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        with torch.no_grad():
            logits = model(tokens).logits
            mask = torch.ones_like(tokens)
            follow = model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        return logits, gradients(model, tokens), follow

    theirs = run()
    with convolutions_in(modeling):
        ours = run()
    return {
        "logits": difference(ours[0], theirs[0]),
        "gradients": max(difference(ours[1][name], each) for name, each in theirs[1].items()),
        "same tokens": torch.equal(ours[2], theirs[2]),
    }


def seconds(run: Callable[[], Any], device: str) -> float:
    """The shortest time of some calls."""
    found = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    import transformers.models.mamba.modeling_mamba as modeling

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = model_of(args.hidden, args.layers, args.device, dtype)
    tokens = torch.randint(0, 256, (2, args.tokens), device=args.device)
    with sst.use(None if args.device == "cpu" else "records.db", allow=("exact", "nearest", "default")):
        for name, each in compared(model, tokens, 8).items():
            print(f"{name}: {each if isinstance(each, bool) else f'{each:.1e} apart'}")
        theirs = seconds(lambda: gradients(model, tokens), args.device)
        with convolutions_in(modeling):
            ours = seconds(lambda: gradients(model, tokens), args.device)
    print(f"a step of training: {1e3 * theirs:.1f} ms, with our convolutions {1e3 * ours:.1f} ms")


if __name__ == "__main__":
    main()
