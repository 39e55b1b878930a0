"""Proof that the servers have the trainer's weights: after a publish, both compute fingerprints,
which are compared bit for bit.

The servers compute theirs while they sample, and both are compared before the weights change again.
So a proof does not delay a step, and at most one batch is sampled from weights that turn out to be
wrong. The publisher calls `Proof.begin` after a publish, and `judge` before the next.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel

from trl_atropos.distributed import together
from trl_atropos.errors import FingerprintError
from trl_atropos.protocol import FingerprintsReply, ParameterSpec
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors.fingerprint import Fingerprints, PlacedPart, fingerprint, joined
from trl_atropos.weights.checkpoint_plan import CheckpointPlan
from trl_atropos.weights.gather import (
    Entry,
    Named,
    base_model,
    buffers_of,
    entries_of,
    is_whole,
    iter_full_parameters,
    local_parts,
    shape_of,
    shapes_of,
)
from trl_atropos.weights.transfer import Fingerprinted

logger = logging.getLogger(__name__)

NAMED = 3  # parameters that a message names
NO_FINGERPRINTS = torch.zeros(0, 2, dtype=torch.int64)  # on ranks that need none


class Comparison(NamedTuple):
    """A comparison that has begun."""

    subject: Fingerprinted
    fingerprints: torch.Tensor  # the trainer's
    replies: Future  # of the servers: a list of `FingerprintsReply`


class Proof:
    """Compares servers and trainer after the publishes of one run. All methods are called on every
    rank."""

    def __init__(self, servers: Servers, subjects: list[Fingerprinted]):
        self.servers = servers
        self.subjects = [subject for subject in subjects if not subject.left_out]
        self._left_out = [subject for subject in subjects if subject.left_out]
        for subject in self._left_out:
            logger.warning(
                "The servers' %s cannot be compared bit for bit: %s.", subject.of, subject.left_out
            )
        self._compared: Counter[str] = Counter()  # number of comparisons, by subject
        # Why parameters cannot be compared, by name; for each server and subject that it traced.
        self._refused: dict[tuple[str, str], dict[str, str]] = {}
        self._begun: list[Comparison] = []
        self.policy_version = 0

    def begin(self, policy_version: int) -> None:
        """Computes the trainer's fingerprints, which are queued on the device, and lets the servers
        compute theirs."""
        self.policy_version = policy_version
        for subject in self.subjects:
            if subject.times is None or self._compared[subject.of] < subject.times:
                self._begun.append(self._begin(subject))

    @property
    def begun(self) -> bool:
        return bool(self._begun)

    def judge(self) -> None:
        """Raises `FingerprintError` on every rank if a server has other weights than the
        trainer."""
        begun = self._begun
        self._begun = []
        for comparison in begun:
            self._judge(comparison)
        self._compared.update(comparison.subject.of for comparison in begun)

    def compare_all_anew(self) -> bool:
        """Lets the servers look anew for their parameters, and compares all of them with the
        trainer's, also those that no publish moves. Returns whether nothing was left out, on any
        rank's servers. Raises `FingerprintError`."""
        self.judge()
        begun = [self._begin(subject, anew=True) for subject in self.subjects]
        for comparison in begun:
            self._judge(comparison)
        return all(gather_object([self.complete]))

    @property
    def complete(self) -> bool:
        """True if all parameters of this rank's servers can be compared. Those that were are equal,
        or `judge` would have raised."""
        if self._left_out or not self.subjects:
            return False
        traced = []
        for client in self.servers.clients:
            for subject in self.subjects:
                traced.append(self._refused.get((client.url, subject.of)))
        return all(refused == {} for refused in traced)

    def forget(self) -> None:
        """Discards pending comparisons and counts, because a new training starts."""
        for comparison in self._begun:
            comparison.replies.cancel()
        self._begun = []
        self._compared.clear()

    def _begin(self, subject: Fingerprinted, anew: bool = False) -> Comparison:
        fingerprints = subject.compute()
        replies = self.servers.each_in_background(partial(self._ask, subject, anew))
        return Comparison(subject, fingerprints, replies)

    def _ask(self, subject: Fingerprinted, anew: bool, client: ServerClient) -> FingerprintsReply:
        if anew or subject.moves or (client.url, subject.of) not in self._refused:
            self._trace(client, subject)
        return client.fingerprints(subject.of)

    def _trace(self, client: ServerClient, subject: Fingerprinted) -> None:
        """Lets a server find its parameters, and logs those that cannot be compared if they are
        others than before."""
        known = self._refused.get((client.url, subject.of))
        refused = client.trace(subject.of, subject.specs)
        self._refused[client.url, subject.of] = refused
        if refused == known:
            return
        proven = sum(spec.name not in refused for spec in subject.specs)
        logger.info(
            "%s: %d of %d parameters are compared bit for bit %s",
            client.url,
            proven,
            len(subject.specs),
            "after every publish" if subject.times is None else "when training begins",
        )
        if not refused:
            return
        refused_by_reason = {}
        for name, reason in refused.items():
            refused_by_reason.setdefault(reason, []).append(name)
        reasons = []
        for reason, names in refused_by_reason.items():
            some = ", ".join(names[:NAMED])
            reasons.append(f"{some} ({reason})")
        logger.warning(
            "%d parameters of the server at %s cannot be compared bit for bit: %s.",
            len(refused),
            client.url,
            "; ".join(reasons),
        )

    def _judge(self, comparison: Comparison) -> None:
        def compare() -> None:
            replies = comparison.replies.result()
            if not replies:
                return
            expected = joined(comparison.fingerprints)
            for client, reply in zip(self.servers.clients, replies, strict=True):
                self._compare(comparison.subject, expected, client, reply)

        together(compare)

    def _compare(
        self,
        subject: Fingerprinted,
        expected: list[int],
        client: ServerClient,
        reply: FingerprintsReply,
    ) -> None:
        if reply.policy_version != self.policy_version:
            raise FingerprintError(
                f"The server at {client.url} samples from policy version "
                f"{reply.policy_version} but the trainer published {self.policy_version}: a "
                "publish was lost, or another trainer writes to this server."
            )
        if reply.changed:
            raise FingerprintError(
                f"After publishing policy version {self.policy_version}, the server at "
                f"{client.url} computes with other constants than when training began, "
                f"although no publish changes them: {_some_of(reply.changed)}. Its memory was "
                "overwritten, or something changed the model inside it: do not trust rollouts "
                "since the publish before, start the server again, and resume from a checkpoint "
                "before it."
            )
        refused = self._refused[client.url, subject.of]
        wrong = []
        for spec, mine, served in zip(subject.specs, expected, reply.fingerprints, strict=True):
            if mine != served and spec.name not in refused:
                wrong.append(spec.name)
        if wrong:
            raise FingerprintError(
                f"After publishing policy version {self.policy_version}, {len(wrong)} of "
                f"{len(expected)} parameters of the server at {client.url} are not bit for bit "
                f"those that the trainer has: {_some_of(wrong)}. The server does not sample from "
                "the weights that are trained: do not trust rollouts of this version, and resume "
                "from a checkpoint before it."
            )


def _some_of(names: list[str]) -> str:
    others = " and others" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + others


class OwnFingerprints:
    """
    Computes the trainer's fingerprints, of parameters in the dtypes in which they are published.

    Args:
        entries: returns the parameters, in the order of the result.
        buffers: returns the buffers, which follow them. Every rank has them whole.
        here: whether this rank needs the result. Sharded trainers add up their parts in any case.
    """

    def __init__(
        self,
        entries: Callable[[], list[Entry]],
        buffers: Callable[[], list[Named]],
        accelerator: Accelerator,
        here: bool,
    ):
        self.entries = entries
        self.buffers = buffers
        self.accelerator = accelerator
        self.here = here
        self._addresses: list[int] = []  # of the parts that `_prepared` reads
        self._prepared: Fingerprints | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._converted: list[Fingerprints] = []  # of each part, in the scratch memory

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        sharded = not is_whole(self.accelerator)
        if not (self.here or sharded):
            return NO_FINGERPRINTS
        parts = []  # of this rank
        dtypes = []  # by the number of the fingerprint
        for entry in self.entries():
            shape = shape_of(entry.parameter)
            for values, part in local_parts(entry.parameter, self.accelerator):
                parts.append(PlacedPart(values, part, shape, len(dtypes)))
            dtypes.append(entry.dtype)
        for _, buffer in self.buffers():
            if not sharded or self.accelerator.is_main_process:
                parts.append(PlacedPart.whole(buffer, len(dtypes)))
            dtypes.append(buffer.dtype)
        sums = self._of_parts(parts, dtypes)
        if sharded:
            sums = sums.to(self.accelerator.device)
            dist.all_reduce(sums)
        return sums

    def _of_parts(self, parts: list[PlacedPart], dtypes: list[torch.dtype]) -> torch.Tensor:
        device = self.accelerator.device
        addresses = []
        for part in parts:
            values = part.values
            is_converted = values.dtype != dtypes[part.number]
            if is_converted or values.device.type != device.type:
                return self._of_copies(parts, dtypes, device)
            addresses.append(values.data_ptr())
        if self._prepared is None or self._addresses != addresses:
            self._addresses = addresses
            self._prepared = Fingerprints(parts, len(dtypes))
        return self._prepared.compute()

    def _of_copies(
        self, parts: list[PlacedPart], dtypes: list[torch.dtype], device: torch.device
    ) -> torch.Tensor:
        """Converts the parts, or copies them to the device, one by one, because a copy of all might
        not fit."""
        num_bytes = []
        for part in parts:
            dtype = dtypes[part.number]
            num_bytes.append(part.values.numel() * dtype.itemsize)
        largest = max(num_bytes)
        if self._scratch.numel() < largest:
            self._scratch = torch.empty(largest, dtype=torch.uint8, device=device)
            self._converted = []
        sums = torch.zeros(len(dtypes), 2, dtype=torch.int64, device=device)
        for index, part in enumerate(parts):
            scratch = self._scratch[: num_bytes[index]]
            copy = scratch.view(dtypes[part.number])
            copy = copy.view(part.values.shape)
            copy.copy_(part.values)
            if index == len(self._converted):
                in_scratch = part._replace(values=copy, number=0)
                self._converted.append(Fingerprints([in_scratch], 1))
            (sum_of_part,) = self._converted[index].compute()
            sums[part.number] += sum_of_part
        return sums


def checkpoint_specs(trainer: Any, servers: Servers) -> list[ParameterSpec]:
    """Returns the parameters as the servers have them, and the checkpoint's buffers (a router's
    correction bias), with the tensors of a checkpoint that each consists of."""
    dtype = getattr(torch, servers.info.dtype)
    shapes = shapes_of(trainer.model, trainer.accelerator, dtype)
    for name, buffer in buffers_of(trainer.model):
        shapes[name] = (buffer.shape, buffer.dtype)
    return CheckpointPlan(base_model(trainer.model), shapes).specs()


def fingerprinted_weights(trainer: Any, servers: Servers, merged: bool = True) -> Fingerprinted:
    """Returns all weights, as they are published: an adapter is merged into them, unless the
    servers have it apart."""
    accelerator = trainer.accelerator
    here = bool(servers.clients)
    dtype = getattr(torch, servers.info.dtype)

    # All take the trainer's model as it is then: FSDP2 replaces its parameters when training
    # begins.
    def entries() -> list[Entry]:
        return entries_of(trainer.model, accelerator, dtype)

    def buffers() -> list[Named]:
        return buffers_of(trainer.model)

    def compute_merged() -> torch.Tensor:
        parameters = iter_full_parameters(trainer.model, accelerator, dtype)
        return of_stream(itertools.chain(parameters, buffers()), here)

    if merged and isinstance(trainer.model, PeftModel):
        compute = compute_merged
    else:
        compute = OwnFingerprints(entries, buffers, accelerator, here)
    return Fingerprinted("weights", checkpoint_specs(trainer, servers), compute)


def fingerprinted_base(trainer: Any, servers: Servers) -> Fingerprinted:
    """Returns weights that no publish moves, without the adapter: those of `colocate`, and a frozen
    model."""
    return fingerprinted_weights(trainer, servers, merged=False)._replace(times=1)


@torch.no_grad()
def of_stream(named: Iterable[Named], here: bool) -> torch.Tensor:
    """Computes the fingerprints of whole parameters while all ranks gather them, if this rank needs
    them `here`."""
    sums = []
    for _, tensor in named:
        if here:
            sums.append(fingerprint(tensor))
    return torch.stack(sums) if sums else NO_FINGERPRINTS
