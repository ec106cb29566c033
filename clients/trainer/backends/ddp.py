# pyright: basic, reportMissingImports=false
"""A complete model on every rank; gradients are summed while the last backward pass still runs.

``DistributedDataParallel`` would average what it reduces, in the model's dtype. Here the whole step's gradient is
summed, in float32: for a bfloat16 model the sums of the earlier passes, which are with the master weights, go along.
"""

import weakref
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from staleflow.clients.trainer.backends.collectives import Ranks
from staleflow.clients.trainer.backends.single import PlainLearner
from staleflow.configs.schema import Config

dist: Any = torch_distributed


class DdpLearner(PlainLearner):
    """``Learner`` over replicas. The last passes of all ranks come together; some ranks may have more before."""

    def __init__(self, model: Any, config: Config, ranks: Ranks) -> None:
        super().__init__(model, config, ranks)
        self._replica: Any = DistributedDataParallel(model)
        # what is registered stays with the reducer, out of the garbage collector's sight: it must not hold the model
        self._replica.register_comm_hook(weakref.ref(self), _summed)

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        # not the replica's ``no_sync``: its forward may talk to the other ranks, who have fewer of these passes
        return (self._replica if last else self.model)(**inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last:
            self.optimizer.collected()  # the hook did it
        else:
            self.optimizer.collect()

    def summed(self, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket's gradients over the ranks, with what earlier passes of the step left in the masters."""
        parameters, gradients = bucket.parameters(), bucket.gradients()
        masters = [self.optimizer.master_of(parameter) for parameter in parameters]
        if masters[0] is parameters[0]:
            plain: Future[Tensor] = _coming(bucket.buffer()).then(lambda done: done.value()[0])
            return plain
        flat = torch.cat([_with(gradient, master) for gradient, master in zip(gradients, masters, strict=True)])

        def spread(done: Any) -> Tensor:
            for master, part in zip(masters, done.value()[0].split([m.numel() for m in masters]), strict=True):
                master.grad = part.view_as(master)
            buffer: Tensor = bucket.buffer()
            return buffer

        summed: Future[Tensor] = _coming(flat).then(spread)
        return summed


def _summed(learner: "weakref.ref[DdpLearner]", bucket: GradBucket) -> Future[Tensor]:
    """The learner's own ``summed``; it lives while one of its backward passes runs."""
    living = learner()
    assert living is not None
    return living.summed(bucket)


def _coming(flat: Tensor) -> Any:
    """The sum over the ranks, in place; a future of it."""
    return dist.all_reduce(flat, async_op=True).get_future()


def _with(gradient: Tensor, master: Tensor) -> Tensor:
    """float32, flat: the gradient of this pass and of those before."""
    flat = gradient.detach().reshape(-1).to(torch.float32)
    return flat if master.grad is None else flat + master.grad.reshape(-1)
