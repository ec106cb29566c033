"""Leases and samples, as a foreign engine exchanges them with a run, and the check of samples against their lease."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.engines.base import Sampling
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.tensors import Array
from staleflow.protocols.wire.trajectory import Finish, GroupPayload
from staleflow.protocols.wire.typed_columns import TypedColumn, encode_columns

Loaded = tuple[Lineage, Version]
Stretch = tuple[Lineage, Version, int]
"""Lineage, version and number of consecutive tokens that this version wrote."""


class LeaseError(ValueError):
    """A call does not match its lease; the text names the sample, the value and what is allowed.

    Nothing was sent. A lease that was held before the call is still held.
    """


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The exclusive right to generate one group: ``group_size`` samples of the prompt in ``row``."""

    group: GroupId
    id: LeaseId
    row: Mapping[str, Any]
    """Columns of the prompt's row; ``prompt`` is its text."""
    lineage: Lineage
    """Lineage of ``min_version``."""
    min_version: Version
    """Oldest version that may write a token of the group. It was loaded before the lease was returned."""
    max_version: Version | None
    """The deadline: the last step that may train the group, and so the newest version that can write a token of it.
    None with ``staleness.bound = "token"``, where a group has no deadline."""
    group_size: int
    sampling: Sampling
    """Sampling settings of the run. Log-probabilities must be those of the distribution after temperature."""
    seeds: tuple[int, ...]
    """One seed for each sample. Their use is optional; another lease of the same group has others."""
    prompt_ids: NDArray[np.int32] | None = None
    """Token ids of the prompt, if another worker has started the group; else None."""
    samples: "tuple[Sample, ...]" = ()
    """The samples of a group that another worker has started, ``group_size`` of them; else empty. Those with
    ``finish="interrupted"`` must be continued after their last token (there may be none yet); the others are complete.
    """
    move_ordered: bool = False
    """The run wants another worker to continue the group: hand it over soon with ``partial``, or ignore the order."""
    interrupted: bool = False
    """The run asks for the tokens written so far: push them soon, with ``finish="interrupted"``."""
    ended: bool = False
    """The lease was pushed, handed over or released, or the run took it back: its tokens are discarded."""
    used: bool = False
    """The client pushed, handed over or released it."""
    on_change: Callable[[], None] | None = None
    """Called when ``interrupted``, ``move_ordered`` or ``ended`` becomes True, in the thread of the client's event
    loop."""

    @property
    def deadline(self) -> Step | None:
        """Last train step that may consume the group; None with the token bound."""
        return None if self.max_version is None else Step(self.max_version)

    def changed(self) -> None:
        """Call ``on_change``."""
        if self.on_change is not None:
            self.on_change()

    def __str__(self) -> str:
        return f"lease {self.id} of group {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One completion. A stop token that was sampled is its last token."""

    token_ids: Sequence[int] | NDArray[np.integer[Any]]
    logprobs: Sequence[float] | NDArray[np.floating[Any]]
    """Log-probability of each token in the distribution that it was sampled from."""
    versions: int | Sequence[int] | NDArray[np.integer[Any]] | None = None
    """Version that wrote each token, or one for all of them. None: tokens taken over from ``Lease.samples`` keep
    theirs; the others are of the only version that was loaded since the lease was taken."""
    finish: Literal["stop", "length", "interrupted"] = "stop"
    loss_mask: Sequence[int] | NDArray[np.integer[Any]] | None = None
    """1 for tokens that the policy wrote, 0 for those of ``environment.run``; None: all 1."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Typed columns of the run (``[[column]]``) by name: an array with one value for each token of ``token_ids``, or
    one value for the sample, an array, a number or bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The tokens of one sample that another worker wrote."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    segments: Sequence[Stretch]

    def begins(self, token_ids: Array, logprobs: Array) -> bool:
        """Return whether a sample begins with these tokens.

        The log-probabilities distinguish a continued sample from one that was generated again with the same first
        tokens.
        """
        end = len(self.token_ids)
        same_tokens = np.array_equal(token_ids[:end], self.token_ids)
        return same_tokens and np.array_equal(logprobs[:end], self.logprobs)


@dataclass(slots=True, eq=False)
class LoadedDuring:
    """Versions that may have written tokens of a lease: the one loaded when it was taken, those loaded since, and those
    of the samples that another worker left."""

    loads: list[Loaded] = field(default_factory=list[Loaded])
    prefixes: Sequence[Prefix] = ()

    def lineage_of(self, version: int, where: str) -> Lineage:
        """Return the lineage in which ``version`` was loaded. Raise ``LeaseError`` if it was not, or in two."""
        allowed = {*self.loads, *((lineage, v) for prefix in self.prefixes for lineage, v, _ in prefix.segments)}
        lineages = sorted({lineage for lineage, loaded in allowed if loaded == version})
        if len(lineages) == 1:
            return lineages[0]
        if not lineages:
            loaded = ", ".join(str(version) for version in sorted({version for _, version in allowed}))
            raise LeaseError(f"{where}: version {version} was not loaded while the lease was held; it must be {loaded}")
        raise LeaseError(f"{where}: the run was rolled back and version {version} loaded again; release the lease")

    def only(self, where: str) -> Loaded:
        """Return the only version. Raise ``LeaseError`` if there are several."""
        if len(set(self.loads)) == 1:
            return self.loads[0]
        versions = ", ".join(str(version) for _, version in self.loads)
        raise LeaseError(
            f"{where}: versions is None, but {versions} were loaded while the lease was held; give one a token"
        )

    def implied(self, token_ids: Array, logprobs: Array, where: str) -> "list[Stretch]":
        """Return the versions of the tokens of a sample without versions of its own. Raise ``LeaseError``."""
        matching = [prefix for prefix in self.prefixes if prefix.begins(token_ids, logprobs)]
        longest = max(matching, key=lambda prefix: len(prefix.token_ids), default=None)
        segments = [] if longest is None else list(longest.segments)
        if more := len(token_ids) - sum(tokens for *_, tokens in segments):
            segments.append((*self.only(where), more))
        return segments


def group_payload(
    lease: Lease,
    prompt_ids: Sequence[int] | NDArray[np.integer[Any]],
    samples: Sequence[Sample],
    loaded: LoadedDuring,
    declared: Sequence[TypedColumn] = (),
    *,
    unfinished: bool = False,
) -> GroupPayload:
    """Return the checked columns of a group. Raise ``LeaseError`` for the first thing that is wrong.

    ``unfinished``: some samples are not finished, so their typed columns may be missing.
    """
    if len(samples) != lease.group_size:
        raise LeaseError(
            f"{lease}: {len(samples)} samples; it must have {lease.group_size}, as rollout.group_size says"
        )
    segments: list[tuple[int, Lineage, Version, int]] = []
    columns: dict[str, list[Array]] = {"token_ids": [], "logprobs": [], "loss_mask": []}
    for number, sample in enumerate(samples):
        where, tokens = f"{lease}, sample {number}", len(sample.token_ids)
        if tokens > lease.sampling.max_new_tokens and sample.loss_mask is None:
            allowed = f"rollout.max_new_tokens allows {lease.sampling.max_new_tokens}"
            raise LeaseError(f"{where}: {tokens} tokens; {allowed}")
        mask = np.ones(tokens, np.uint8) if sample.loss_mask is None else sample.loss_mask
        given = (("token_ids", sample.token_ids, np.int32), ("logprobs", sample.logprobs, np.float32))
        for name, values, dtype in (*given, ("loss_mask", mask, np.uint8)):
            columns[name].append(_column(name, values, np.dtype(dtype), tokens, where))
        written = _segments(sample, columns["token_ids"][-1], columns["logprobs"][-1], loaded, where)
        segments += [(number, *segment) for segment in written]
    lengths = [len(sample.token_ids) for sample in samples]
    try:
        typed = encode_columns(declared, [sample.columns for sample in samples], lengths, fill=unfinished)
    except ValueError as error:
        raise LeaseError(f"{lease}, {error}") from error
    payload = GroupPayload(
        prompt_ids=_column("prompt_ids", prompt_ids, np.dtype(np.int32), len(prompt_ids), str(lease)),
        lengths=np.array(lengths, np.int32),
        token_ids=np.concatenate(columns["token_ids"]),
        logprobs=np.concatenate(columns["logprobs"]),
        loss_mask=np.concatenate(columns["loss_mask"]),
        segments=np.array(segments, np.int64).reshape(-1, 4),
        finish=np.array(
            [_finish(sample, f"{lease}, sample {number}") for number, sample in enumerate(samples)], np.uint8
        ),
        columns=typed,
    )
    try:
        payload.check()
    except ProtocolError as error:
        raise LeaseError(f"{lease}: {error.detail}") from error
    return payload


def _column(name: str, values: Any, dtype: "np.dtype[Any]", tokens: int, where: str) -> Array:
    try:
        array = np.asarray(values)
        whole = dtype.kind == "f" or array.size == 0 or array.dtype.kind in "iub"
        if array.ndim != 1 or not whole:
            raise ValueError(f"{array.dtype} with {array.ndim} dimensions")
        converted = array.astype(dtype)
        if dtype.kind != "f" and not np.array_equal(converted, array):
            raise ValueError(f"a number that {dtype} cannot hold")
    except (TypeError, ValueError, OverflowError) as error:
        raise LeaseError(f"{where}: {name} is not a list of {dtype} numbers: {error}") from error
    if len(converted) != tokens:
        raise LeaseError(f"{where}: {len(converted)} {name}; it must have {tokens}, one a token")
    return converted


def _segments(sample: Sample, token_ids: Array, logprobs: Array, loaded: LoadedDuring, where: str) -> list[Stretch]:
    """Return the stretches of tokens that one version wrote."""
    if not (tokens := len(token_ids)):
        return []
    if sample.versions is None:
        return loaded.implied(token_ids, logprobs, where)
    if isinstance(sample.versions, int):
        return [(loaded.lineage_of(sample.versions, where), Version(sample.versions), tokens)]
    versions = _column("versions", sample.versions, np.dtype(np.int64), tokens, where)
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    stretches: list[Stretch] = []
    for start, end in zip(starts, [*starts[1:], tokens], strict=True):
        version = Version(int(versions[start]))
        stretches.append((loaded.lineage_of(version, where), version, end - start))
    return stretches


def _finish(sample: Sample, where: str) -> Finish:
    try:
        return Finish[sample.finish.upper()]
    except (KeyError, AttributeError):
        allowed = ", ".join(finish.name.lower() for finish in Finish)
        raise LeaseError(f"{where}: finish is {sample.finish!r}; it must be one of {allowed}") from None
