"""A 2-layer GPT-2 with tied embeddings and two parameter groups, and its twin's gradient oracle on the same data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from decent_opt.testing import seeded

VOCABULARY, CONTEXT, BATCH = 61, 12, 2


def build(dtype: torch.dtype) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    with seeded(0):
        return GPT2LMHeadModel(config).to(dtype)


def groups(model: GPT2LMHeadModel, lr: float) -> list[dict[str, object]]:
    """Matrices with weight decay; vectors without, at half the learning rate."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "lr": lr, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": lr / 2, "weight_decay": 0.0},
    ]


def coordinates(model: GPT2LMHeadModel, lr: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two groups as vectors over the coordinates of `flatten`: learning rate and weight decay."""
    rates, decays = [], []
    for p in model.parameters():
        rates.append(torch.full((p.numel(),), lr if p.dim() >= 2 else lr / 2, dtype=dtype))
        decays.append(torch.full((p.numel(),), 0.1 if p.dim() >= 2 else 0.0, dtype=dtype))
    return torch.cat(rates), torch.cat(decays)


def flatten(model: GPT2LMHeadModel) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def backward(model: GPT2LMHeadModel, worker: int, step: int) -> None:
    """Gradients of worker's batch of this step (counted from 1), by (worker, step) alone."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=generator)
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()


def gradient_oracle(dtype: torch.dtype) -> Callable[[int, Tensor, int], Tensor]:
    model = build(dtype)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]

    def gradient(worker: int, x: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            for parameter, value in zip(parameters, x.split(sizes), strict=True):
                parameter.copy_(value.view_as(parameter))
        backward(model, worker, step)
        return torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])

    return gradient
