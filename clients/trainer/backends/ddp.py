# pyright: basic, reportMissingImports=false
"""A complete model on every rank; gradients are reduced while the last backward pass still runs.

``DistributedDataParallel`` would average in the model's dtype. Here the whole step's gradient is summed in float32: for
a bfloat16 model, the sums of earlier passes, which are stored with the master weights, are included.
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
    """``Learner`` over replicas. The last passes of all ranks run together; some ranks may run more passes before."""

    def __init__(self, model: Any, config: Config, ranks: Ranks) -> None:
        super().__init__(model, config, ranks)
        self._replica: Any = DistributedDataParallel(model)
        # The garbage collector cannot see into the reducer, so the hook stored there must not reference the model.
        self._replica.register_comm_hook(weakref.ref(self), _summed)

    def forward(self, *, last: bool, **inputs: Any) -> Any:
        # Not the replica's ``no_sync``: its forward may communicate with ranks that have fewer of these passes.
        return (self._replica if last else self.model)(**inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last:
            self.optimizer.clear_model_gradients()  # the hook has already added them to the masters
        else:
            self.optimizer.collect()

    def summed(self, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket's gradients over the ranks, including the sums of the step's earlier passes in the masters."""
        parameters, gradients = bucket.parameters(), bucket.gradients()
        masters = [self.optimizer.master_of(parameter) for parameter in parameters]
        if masters[0] is parameters[0]:
            plain: Future[Tensor] = _reduce(bucket.buffer()).then(lambda done: done.value()[0])
            return plain
        flat = torch.cat([_plus_master(gradient, master) for gradient, master in zip(gradients, masters, strict=True)])

        def spread(done: Any) -> Tensor:
            for master, part in zip(masters, done.value()[0].split([m.numel() for m in masters]), strict=True):
                master.grad = part.view_as(master)
            buffer: Tensor = bucket.buffer()
            return buffer

        summed: Future[Tensor] = _reduce(flat).then(spread)
        return summed


def _summed(learner: "weakref.ref[DdpLearner]", bucket: GradBucket) -> Future[Tensor]:
    """Call the learner's ``summed``; the learner exists while one of its backward passes runs."""
    living = learner()
    assert living is not None
    return living.summed(bucket)


def _reduce(flat: Tensor) -> Any:
    """Return a future of the in-place sum over the ranks."""
    return dist.all_reduce(flat, async_op=True).get_future()


def _plus_master(gradient: Tensor, master: Tensor) -> Tensor:
    """Return the flat float32 gradient of this pass plus those before."""
    flat = gradient.detach().reshape(-1).to(torch.float32)
    return flat if master.grad is None else flat + master.grad.reshape(-1)
