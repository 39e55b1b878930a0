"""Chooses the kernel that attends to packed rows on a GPU: torch's own, or a newer FlashAttention,
and cuDNN for long rollouts.

Torch has a place where another library may compute what its own FlashAttention 2 does, also in
`varlen_attn` (`torch.nn.attention.activate_flash_attention_impl`). `use` tries the libraries on
attention of the model's shape. A kernel is right if its results and gradients are as close to those
in float32 as torch's, and the fastest of those that are right is used. If rollouts may be long,
cuDNN is tried in the same way, and attends to them if it is faster than that one.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn import attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_atropos.batches.long_attention import LONG, attend_in_turn
from trl_atropos.batches.packed_attention import ATTENTION, attend, attend_at_once
from trl_atropos.batches.sequence_parallel import RankHeads
from trl_atropos.distributed import on_main
from trl_atropos.errors import RecipeError

logger = logging.getLogger(__name__)

AUTO = "auto"
TORCH = "torch"  # FlashAttention 2, which torch comes with
CUDNN = "cudnn"  # for long rollouts alone (`long_attention.py`)
# The libraries that torch knows by these names, as it imports them, and as they are installed.
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
INSTALLATION = {
    "FA3": "Build `flash-attn-3` from the folder `hopper` of FlashAttention",
    "FA4": "Install it with `pip install trl_atropos[flash]`",
}
# Tokens of the parts that kernels are tried with: of queries, and of keys, which begin elsewhere.
TRIED = ((5, 5), (130, 130), (300, 420), (1, 64))
WIDEST_TRIED = 4096  # tokens: one more part of the trial is longer than any window up to this
TIMED = 16_384  # tokens of a row
TIMED_RUNS = 3
# The bound of FlashAttention's own tests: a kernel may be this many times as far from float32 as
# another one in the same dtype. The roundings beside that are of the size of the results.
TIMES_AS_FAR = 2.0
ROUNDINGS = 4


class AttentionShape(NamedTuple):
    """Describes the attention of a layer."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    window: int | None  # tokens
    scaling: float | None


class Row(NamedTuple):
    """Holds queries, keys and values of packed parts, and what a kernel gets beside them."""

    states: tuple[Tensor, Tensor, Tensor]  # (1, heads, T, head_dim), with gradients
    counts: Tensor  # (2, parts): tokens of queries and of keys
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        shape: AttentionShape,
        parts: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Row":
        """Returns random parts, each of so many queries and keys."""
        counts = torch.tensor(parts, dtype=torch.int32).T
        queries, keys = counts.sum(1).tolist()
        draw = torch.Generator(device).manual_seed(0)

        def states(heads: int, tokens: int, size: int) -> Tensor:
            drawn = torch.randn(1, heads, tokens, size, device=device, generator=draw)
            return drawn.to(dtype).requires_grad_()

        query = states(shape.heads, queries, shape.head_dim)
        key = states(shape.key_heads, keys, shape.head_dim)
        value = states(shape.key_heads, keys, shape.value_dim)
        ends = counts.cumsum(1, dtype=torch.int32)
        query_borders, key_borders = torch.nn.functional.pad(ends, (1, 0)).to(device)
        longest_query, longest_key = counts.amax(1).tolist()
        options = {
            "cu_seq_lens_q": query_borders,
            "cu_seq_lens_k": key_borders,
            "max_length_q": longest_query,
            "max_length_k": longest_key,
            "scaling": shape.scaling,
            "sliding_window": shape.window,
        }
        return cls((query, key, value), counts, options)

    def attended(self, name: str) -> list[Tensor]:
        """Returns what a kernel computes, and the gradients of queries, keys and values if that is
        squared and added up."""
        with activated(name):
            if name == CUDNN:
                output = attend_in_turn(*self.states, self.counts, self.options["scaling"])
            else:
                output = attend_at_once(*self.states, None, **self.options)
            gradients = torch.autograd.grad(output.square().sum(), self.states)
        return [output.detach(), *gradients]

    def attended_exactly(self) -> list[Tensor]:
        """Returns the same by torch's attention in float32, part by part."""
        exact = [states.detach().float().requires_grad_() for states in self.states]
        query, key, _ = exact
        output, _ = attend(
            RankHeads(query.size(1) // key.size(1)),
            *exact,
            None,
            rollout_lengths=self.counts,
            scaling=self.options["scaling"],
            sliding_window=self.options["sliding_window"],
            dropout=0.0,
        )
        return [output.detach(), *torch.autograd.grad(output.square().sum(), exact)]


def installed() -> list[str]:
    """Returns the names of the newer kernels that this version of torch knows and that can be
    imported."""
    known = getattr(attention, "list_flash_attention_impls", list)()
    return [name for name in known if name in MODULES and _can_be_found(MODULES[name])]


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def require_installed(name: str) -> None:
    """Raises `RecipeError` if a kernel of this name is not there."""
    if name in installed():
        return
    raise RecipeError(
        f"`attention_kernel: {name}` is not installed, or this version of torch does not know it",
        f"attention_kernel: {name}, torch {torch.__version__}",
        f"{INSTALLATION.get(name, 'Install it')}, or leave `attention_kernel` out.",
        "attention_kernel",
    )


@contextmanager
def activated(name: str) -> Iterator[None]:
    """Has torch compute by this kernel within the context, and by its own after it."""
    activate(name)
    try:
        yield
    finally:
        activate(TORCH)


def activate(name: str) -> None:
    """Has torch compute by this library from now on, in the whole process; by its own kernels, if
    it is none."""
    if name in MODULES:
        attention.activate_flash_attention_impl(name)
    elif attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


class Chosen(NamedTuple):
    """Names what attends to the packed rows of a run."""

    kernel: str
    long_in_turn: bool  # cuDNN attends to rows of long rollouts


def use(
    wanted: str,
    find_shapes: Callable[[], Collection[AttentionShape]],
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
) -> Chosen:
    """
    Has packed rows attended to by the kernel that a run wants, and returns what that is. Call this
    on every rank: all of them use what rank 0 found. Raises `RecipeError` if that kernel is wrong.

    Args:
        wanted: a kernel's name; `"auto"` = the fastest of those that are there and right.
        find_shapes: returns those of the models' layers. It is called on all ranks, or, if there is
            no choice, on none: it takes a forward pass.
        device, dtype: of the rows.
        longest: tokens of the run's longest rollouts.
    """
    names = on_main(partial(_candidates, wanted, longest))
    if not names:
        activate(TORCH)
        return Chosen(TORCH, False)
    shapes = find_shapes()
    trials = on_main(partial(try_kernels, names, sorted(shapes, key=str), device, dtype))
    if wanted in trials.reasons:
        raise RecipeError(
            f"`attention_kernel: {wanted}` is no choice for this model: {trials.reasons[wanted]}",
            f"attention_kernel: {wanted}",
            "Leave `attention_kernel` out, or update the package.",
            "attention_kernel",
        )
    if PartialState().is_main_process:
        for name, reason in trials.reasons.items():
            # Nobody installed cuDNN for its attention, which knows no windows.
            level = logging.INFO if name == CUDNN else logging.WARNING
            message = "The attention kernel %s is installed, but not used: %s."
            logger.log(level, message, name, reason)
    chosen = _fastest(wanted, trials.times)
    activate(chosen.kernel)
    return chosen


def _candidates(wanted: str, longest: int) -> list[str]:
    """Returns the names of the kernels that are tried beside torch's own."""
    if wanted == TORCH:
        return []
    if wanted != AUTO:
        return [wanted]
    names = installed()
    if longest >= LONG:
        names.append(CUDNN)
    return names


def _fastest(wanted: str, times: dict[str, float]) -> Chosen:
    """Returns what a run uses of the kernels that are right, by their times."""
    if wanted in MODULES:
        return Chosen(wanted, False)
    if wanted == CUDNN:
        return Chosen(TORCH, True)
    of_all_rows = [name for name in times if name != CUDNN]
    kernel = min(of_all_rows, key=times.__getitem__)
    long_in_turn = CUDNN in times and times[CUDNN] < times[kernel]
    return Chosen(kernel, long_in_turn)


class Trials(NamedTuple):
    """Holds what became of the kernels that were tried."""

    times: dict[str, float]  # of those that are right, relative to torch's own
    reasons: dict[str, str]  # why the others are not


def try_kernels(
    names: Sequence[str],
    shapes: Sequence[AttentionShape],
    device: torch.device,
    dtype: torch.dtype,
) -> Trials:
    """Tries these kernels on attention of these shapes."""
    trials = Trials({TORCH: 1.0}, {})
    own = sum(seconds_of_row(TORCH, shape, device, dtype) for shape in shapes)
    for name in names:
        try:
            for shape in shapes:
                require_exact(name, shape, device, dtype)
            seconds = sum(seconds_of_row(name, shape, device, dtype) for shape in shapes)
        except Exception as error:  # noqa: BLE001 - whatever another library raises
            trials.reasons[name] = f"{type(error).__name__}: {error}"
            continue
        trials.times[name] = seconds / own
        logger.info(
            "The attention kernel %s takes %.2f times as long as torch's own, forward and "
            "backward, on a row of %d tokens.",
            name,
            trials.times[name],
            TIMED,
        )
    return trials


def require_exact(
    name: str, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises `ArithmeticError` if this kernel is farther from float32 than torch's own may be."""
    parts = list(TRIED)
    if name == CUDNN:
        if shape.window is not None:
            raise NotImplementedError("it knows no windows, which some layers have")
        parts = [(keys, keys) for _, keys in TRIED]
    if shape.window is not None and shape.window <= WIDEST_TRIED:
        parts.append((shape.window + 8, shape.window + 8))
    row = Row.of(shape, parts, device, dtype)
    exact = row.attended_exactly()
    own = row.attended(TORCH)
    others = row.attended(name)
    names = ("results", "gradients of queries", "gradients of keys", "gradients of values")
    for what, expected, mine, other in zip(names, exact, own, others, strict=True):
        # The mean shows what is wrong with all tokens by little, such as a window of one more.
        for norm in (Tensor.max, Tensor.mean):
            size = norm(expected.abs()).item()
            allowed = norm((mine.float() - expected).abs()).item()
            bound = TIMES_AS_FAR * allowed + ROUNDINGS * torch.finfo(dtype).eps * size
            distance = norm((other.float() - expected).abs()).item()
            if not distance <= bound:  # NaN is not, either
                raise ArithmeticError(
                    f"its {what} are {distance:.2g} from those in float32 (the {norm.__name__}), "
                    f"and may be {bound:.2g}"
                )


def seconds_of_row(
    name: str, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> float:
    """Returns the seconds that a forward and a backward pass take on a row of one rollout, the
    fastest of a few."""
    row = Row.of(shape, [(TIMED, TIMED)], device, dtype)
    wait: Callable[[], None] = partial(torch.get_device_module(device).synchronize)
    row.attended(name)  # some kernels are compiled when they are first used
    durations = []
    for _ in range(TIMED_RUNS):
        wait()
        began = time.perf_counter()
        row.attended(name)
        wait()
        durations.append(time.perf_counter() - began)
    return min(durations)


# ------------------------------------------------------------------------------ of a model's layers


@contextmanager
def watched_shapes() -> Iterator[set[AttentionShape]]:
    """Collects the shapes of packed attention that is computed within the context."""
    shapes: set[AttentionShape] = set()
    usual = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any):
        shape = AttentionShape(
            heads=query.size(1),
            key_heads=key.size(1),
            head_dim=query.size(3),
            value_dim=value.size(3),
            window=options.get("sliding_window"),
            scaling=options.get("scaling"),
        )
        shapes.add(shape)
        return usual(module, query, key, value, *args, **options)

    AttentionInterface.register(ATTENTION, watched)
    try:
        yield shapes
    finally:
        AttentionInterface.register(ATTENTION, usual)
