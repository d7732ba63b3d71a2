"""Several machines, one process each, started by torchrun: sums, agreement, and news of failures."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from draftline.errors import ConfigError, RunError

log = logging.getLogger(__name__)
T = TypeVar("T")
_FAILURE = "failure"


class Nodes(contextlib.AbstractContextManager["Nodes"]):
    """The process group of a run over several machines; leaving the context closes it.

    Every machine makes the same calls in the same order. Tensors, objects and `agree` each have a
    group of their own, so these three may be used from different threads; `fail` and `poll_failure`
    from any. A call that fails, or waits longer than `deadline_s`, raises RunError with the rank.
    """

    def __init__(
        self,
        device_type: Literal["cpu", "cuda"],
        deadline_s: float,
        *,
        rank: int,
        count: int,
        host: str,
        port: int,
    ) -> None:
        self.rank, self.count = rank, count
        self._device_type = device_type
        self._deadline_s = deadline_s
        self._failed = False
        timeout = timedelta(seconds=deadline_s)
        try:
            # env:// knows whether torchrun's agent or rank 0 serves the store.
            # NCCL's own watchdog ends the process: whoever can name the cause has to speak before it.
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                init_method="env://",
                timeout=3 * timeout if device_type == "cuda" else timeout,
            )
            self._objects = dist.new_group(backend="gloo", timeout=timeout)
            self._agreement = dist.new_group(backend="gloo", timeout=timeout)
            # A connection of its own: the group's would be busy while the group waits on it.
            store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise RunError(
                f"machine {rank} of {count} could not join the others at {host}:{port} within "
                f"{deadline_s:g} s: {_first_line(error)}. Start torchrun on all {count} machines with "
                "the same address; on several networks set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            ) from error
        # torchrun keeps one store over its restarts: an old failure is not this attempt's.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._news = PrefixStore(f"draftline/{attempt}", store)

    @classmethod
    def from_environment(
        cls, device_type: Literal["cpu", "cuda"], deadline_s: float
    ) -> Nodes | None:
        """Joins the other machines, or None without torchrun or with one machine.

        Raises ConfigError for an environment that is incomplete or asks for several processes per
        machine on CUDA, RunError when the others do not come within the deadline.
        """
        count = _number("WORLD_SIZE", 1)
        if count <= 1:
            return None
        missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(k)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={count} says that several machines run, but {', '.join(missing)} is not "
                "set; start with torchrun, or unset WORLD_SIZE"
            )
        local = _number("LOCAL_WORLD_SIZE", 1)
        if device_type == "cuda" and local > 1:
            raise ConfigError(
                f"LOCAL_WORLD_SIZE={local}: draftline runs one process per machine, which drives all "
                "its GPUs with threads; use torchrun --nproc-per-node 1"
            )
        return cls(
            device_type,
            deadline_s,
            rank=_number("RANK", 0),
            count=count,
            host=os.environ["MASTER_ADDR"],
            port=_number("MASTER_PORT", 0),
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over the machines, in place; the same bits everywhere.

        On CUDA it is queued on the current stream of the tensor's device, else done.
        """
        with self._named("the sum over machines"):
            dist.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """Fills `tensor` with machine 0's, in place; queued as `all_reduce` is."""
        with self._named("the copy of machine 0's tensor"):
            dist.broadcast(tensor, src=0)

    def broadcast_object(self, value: T) -> T:
        """Machine 0's `value` (pickled), on every machine."""
        box = [value]
        with self._named("the copy of machine 0's value"):
            dist.broadcast_object_list(box, src=0, group=self._objects)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every machine's `value` (pickled) by rank, on every machine."""
        values = [value] * self.count
        with self._named("the exchange of values"):
            dist.all_gather_object(values, value, group=self._objects)
        return values

    def agree(self, stop: bool) -> bool:
        """True on every machine as soon as one of them asks to stop. The host waits for all."""
        flag = torch.tensor([int(stop)])
        with self._named("the agreement to stop or go on"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._agreement)
        return bool(flag.item())

    def fail(self, message: str) -> None:
        """Tells the other machines that this one failed; the first message of a run is kept."""
        self._failed = True
        try:
            self._news.compare_set(_FAILURE, "", f"{self.rank} {message}")
        except RuntimeError as error:
            log.warning("machine %d could not tell the others: %s", self.rank, _first_line(error))

    def poll_failure(self) -> str | None:
        """What another machine reported with `fail`, or that the store is gone; does not wait."""
        try:
            if not self._news.check([_FAILURE]):
                return None
            sender, _, message = self._news.get(_FAILURE).decode().partition(" ")
        except RuntimeError as error:
            return (
                f"machine {self.rank} lost the store that machine 0's side serves, which ended: "
                f"{_first_line(error)}"
            )
        return None if int(sender) == self.rank else f"machine {sender} failed: {message}"

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            known = self.poll_failure() or "another machine ended, hangs or cannot be reached"
            raise RunError(
                f"machine {self.rank} of {self.count}: {what} failed (deadline "
                f"{self._deadline_s:g} s): {_first_line(error)}. {known}; read the other machines' logs"
            ) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._failed and self.poll_failure() is None:
            # Rank 0 may serve the store: it stays until the others have made their last request.
            try:
                dist.barrier(group=self._agreement)
            except RuntimeError as error:
                log.warning("machine %d closed alone: %s", self.rank, _first_line(error))
        elif self._device_type == "cuda" and dist.group.WORLD is not None:
            # Else closing waits for a sum in which the other machines take no part any more.
            dist.group.WORLD.abort()
        dist.destroy_process_group()


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text} is not a number; start with torchrun") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
