"""Train a causal language model on several workers: plain DDP, gossip of parameters, or m/n blocks of gradients.

    torchrun --nproc-per-node 4 -m decent_opt.recipes.causal_lm --method pd --period 8 --topology ring --output runs/lm

Each worker trains on its own shard of the text. What is evaluated and saved is the workers' average, in the Hugging
Face format. Copy this file and change it: a training loop with DDP needs the lines around `decentralize` only.
"""

import argparse
import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from decent_opt import Decentralized, JsonLines, Monitor, RoundRecord
from decent_opt.errors import ConfigError
from decent_opt.integrations.ddp import decentralize
from decent_opt.integrations.ddp_blocks import BlockSparseState, block_sparse_hook
from decent_opt.optim import LocalAdamW
from decent_opt.recipes.baseline import AllReduce, counted_all_reduce
from decent_opt.recipes.models import new_model
from decent_opt.recipes.text import Corpus, batch, load_corpus


def flag(default: Any, help: str, **options: Any) -> Any:
    """A field of `Settings` and its command line flag."""
    return field(default=default, metadata={"help": help, **options})


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on; one field per command line flag."""

    method: str = flag(
        "pd",
        "pd: gossip of parameters; cpd: of compressed differences; blocks: m/n blocks of gradients at every step; "
        "ddp: all-reduce at every step",
        choices=["pd", "cpd", "blocks", "ddp"],
    )
    period: int = flag(8, "local steps between two rounds of gossip")
    topology: str = flag("ring", "who mixes with whom (ring, one-peer-exponential, hypercube, complete ...)")
    warmup_steps: int = flag(0, "first steps, in which gradients are averaged as in DDP (AdamW needs some)")
    outer_momentum: float = flag(0.0, "slow momentum over rounds, 0 to 1; costs no traffic")
    compressor: str = flag("sign", "cpd: what is done to the differences (sign, random-blocks, topk:share=0.1 ...)")
    order: str = flag(
        "paper", "cpd: paper hides the messages behind local steps; fresh waits", choices=["paper", "fresh"]
    )
    gamma: float = flag(0.0, "cpd: consensus step size; 0: what suits the compressor")
    tau: float = flag(0.0, "blocks: share of its gradient's blocks that a worker sends; 0: 1 / workers")
    estimator: str = flag(
        "error_feedback", "blocks: what they estimate", choices=["unbiased", "error_feedback", "control_variate"]
    )
    optimizer: str = flag("sgd", "the local optimizer", choices=["sgd", "adamw"])
    momentum: float = flag(0.9, "sgd: its momentum")
    lr: float = flag(0.5, "peak learning rate")
    weight_decay: float = flag(0.0, "weight decay")
    clip: float = flag(1.0, "largest norm of a worker's gradient; 0: no clipping")
    ramp: float = flag(0.2, "share of the steps in which the learning rate rises; a cosine to 0 follows")
    steps: int = flag(240, "optimizer steps")
    batch: int = flag(8, "windows of text per worker and step")
    context: int = flag(64, "tokens in a window")
    arch: str = flag("gpt2", "architecture of a new model", choices=["gpt2", "llama"])
    layers: int = flag(2, "its layers")
    width: int = flag(96, "its hidden size")
    heads: int = flag(4, "its attention heads")
    vocabulary: int = flag(2048, "size of its tokenizer, which is trained on the text once and cached")
    model: str = flag("", "train this one instead: a local folder in the Hugging Face format")
    data: tuple[str, ...] = flag((), "UTF-8 text files or glob patterns; default: King James Bible", nargs="+")
    shards: int = flag(0, "parts that the text is cut into; 0: one per worker")
    seed: int = flag(0, "seed of the new model and of the order of the data")
    eval_every: int = flag(20, "steps between evaluations on a small sample; 0: only at the end")
    eval_sample: int = flag(4096, "validation tokens in that sample")
    eval_tokens: int = flag(65536, "validation tokens at the end")
    device: str = flag("auto", "auto: CUDA device LOCAL_RANK if there is one", choices=["auto", "cpu", "cuda"])
    output: str = flag("", "folder for the trained model and its tokenizer")
    log_dir: str = flag("", "folder for one file of rounds per rank, JSON lines")


@dataclass
class Result:
    """What a run measured; `loss` and the curve are of the consensus model and equal on all ranks."""

    parameters: int = 0
    loss: float = math.nan
    curve: list[tuple[int, float, int]] = field(default_factory=list)  # (step, loss, bytes sent by this worker)
    distance: float = 0.0  # between the workers, before the final average
    seconds: float = 0.0  # of training, without evaluation
    records: list[RoundRecord] = field(default_factory=list)

    def bytes_sent(self, after: int = 0) -> int:
        """Bytes that this worker sent for training in the steps after this one."""
        return sum(sum(record.bytes_sent.values()) for record in self.records if record.step > after)


def train(settings: Settings, corpus: Corpus, progress: str | None = "training") -> Result:
    """Train on all ranks that torch.distributed knows of; collective, with the same arguments on all of them.

    `progress` is the title of rank 0's progress bar, None for no bar.
    """
    rank, workers = world()
    device = device_of(settings)
    torch.manual_seed(settings.seed)
    if settings.model:
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    else:
        sizes = {name: getattr(settings, name) for name in ("arch", "layers", "width", "heads", "context")}
        model = new_model(**sizes, tokenizer=corpus.tokenizer)
    model.to(device).train()
    sinks = [JsonLines(Path(settings.log_dir) / f"rounds.{rank}.jsonl")] if settings.log_dir else []

    replica: nn.Module = model
    if workers > 1:
        replica = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = make_optimizer(settings, replica, sinks)
    if isinstance(optimizer, Decentralized):
        monitor = optimizer.monitor
    elif settings.method == "blocks" and isinstance(replica, DistributedDataParallel):
        blocks: dict[str, Any] = {name: getattr(settings, name) for name in ("estimator", "warmup_steps", "seed")}
        state = BlockSparseState(settings.tau or None, model=replica, sinks=sinks, **blocks)
        replica.register_comm_hook(state, block_sparse_hook)
        monitor = state.monitor
    else:
        monitor = Monitor(sinks)
        if isinstance(replica, DistributedDataParallel):
            replica.register_comm_hook(AllReduce(monitor), counted_all_reduce)  # DDP as ever, only counted
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, settings))

    shard = corpus.shard(rank, settings.shards or workers)
    sample = corpus.validation_windows(settings.context, settings.eval_sample)
    result = Result(parameters=sum(p.numel() for p in model.parameters()))
    bar = tqdm(total=settings.steps, desc=progress, disable=progress is None or rank > 0)

    def note(step: int) -> None:
        with optimizer.averaged() if isinstance(optimizer, Decentralized) else nullcontext():
            loss = evaluate(model, sample)
        result.curve.append((step, loss, monitor.bytes_sent))
        bar.set_postfix_str(f"validation loss {loss:.3f}")

    if settings.eval_every:
        note(0)
    for step in range(1, settings.steps + 1):
        began = time.perf_counter()
        ids = batch(shard, settings.seed, rank, step, settings.batch, settings.context).to(device)
        replica(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if settings.clip:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        result.seconds += time.perf_counter() - began
        bar.update()
        if settings.eval_every and step % settings.eval_every == 0:
            note(step)
    bar.close()

    if isinstance(optimizer, Decentralized):
        result.distance = optimizer.consensus_distance()
        optimizer.consensus_()  # from here on all workers hold the same model
        optimizer.close()
    result.loss = evaluate(model, corpus.validation_windows(settings.context, settings.eval_tokens))
    result.records = list(monitor.records)
    if settings.output and rank == 0:
        model.save_pretrained(settings.output)
        corpus.tokenizer.save_pretrained(settings.output)
    return result


def make_optimizer(settings: Settings, replica: nn.Module, sinks: Sequence[Any] = ()) -> torch.optim.Optimizer:
    """The local optimizer, with gossip of parameters around it if that is the method."""
    parameters, base = replica.parameters(), dict[str, Any](lr=settings.lr, weight_decay=settings.weight_decay)
    names = ("period", "topology", "warmup_steps", "outer_momentum")
    gossip: dict[str, Any] = {"sinks": sinks, **{name: getattr(settings, name) for name in names}}
    if settings.method == "cpd":
        gossip |= {"algorithm": "cpd", "compressor": settings.compressor, "order": settings.order}
        gossip |= {"gamma": settings.gamma} if settings.gamma else {}
    gossips = settings.method in ("pd", "cpd")
    if gossips and settings.optimizer == "adamw":
        # Adam's second moment must not be that of one worker's noisy gradients, so AdamW has a class of its own.
        return decentralize(replica, LocalAdamW(parameters, **base, **gossip))
    adamw = settings.optimizer == "adamw"
    local = (
        torch.optim.AdamW(parameters, **base)
        if adamw
        else torch.optim.SGD(parameters, momentum=settings.momentum, **base)
    )
    return decentralize(replica, local, **gossip) if gossips else local


def learning_rate(step: int, settings: Settings) -> float:
    """Factor on the peak: a linear rise from step 0, then half a cosine down to 0."""
    rise = max(1, round(settings.ramp * settings.steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, settings.steps - rise)))


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, size: int = 32) -> float:
    """Mean loss over windows of text, which the ranks share out; collective. The ranks hold the same model."""
    rank, workers = world()
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for ids in windows[rank::workers].split(size):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
        total += torch.tensor([float(loss) * len(ids), len(ids)], dtype=torch.float64, device=device)
    model.train()
    if workers > 1:
        dist.all_reduce(total)
    return float(total[0] / total[1])


def world() -> tuple[int, int]:
    """(rank, number of workers)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def device_of(settings: Settings) -> torch.device:
    """The device of this rank."""
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from a command line."""
    about = "Train a causal language model on several workers (torchrun), or on one."
    parser = argparse.ArgumentParser("causal_lm", None, about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for item in fields(Settings):
        kind = str if "nargs" in item.metadata else type(item.default)
        parser.add_argument("--" + item.name.replace("_", "-"), type=kind, default=item.default, **item.metadata)
    values = vars(parser.parse_args(arguments))
    return Settings(**{**values, "data": tuple(values["data"])})


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see `--help`."""
    settings = parse(arguments)
    device = device_of(settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if started := int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, workers = world()
    try:
        first = int(os.environ.get("LOCAL_RANK", "0")) == 0  # trains the tokenizer for all workers of its machine
        if workers > 1 and not first:
            dist.barrier()
        tokenizer = AutoTokenizer.from_pretrained(settings.model) if settings.model else None
        corpus = load_corpus(settings.data, settings.vocabulary, tokenizer)
        if workers > 1 and first:
            dist.barrier()
        result = train(settings, corpus)
    except ConfigError as error:
        raise SystemExit(f"causal_lm: {error}") from error
    finally:
        if started:
            dist.destroy_process_group()
    if rank == 0:
        print(
            f"{result.parameters:,} parameters, {workers} workers, {settings.steps} steps in {result.seconds:.0f} s: "
            f"validation loss {result.loss:.4f}, {result.bytes_sent() / 1e6:.2f} MB sent per worker"
        )


if __name__ == "__main__":
    main()
