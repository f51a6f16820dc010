"""Megatron-Core, with its own data parallelism and optimizer, which has the state in shards or not."""

import sys

import torch.distributed as dist
from digest import end, leave

from tests.support.megatron_models import Trial, build, called, one_step

dist.init_process_group("gloo")
job = build(Trial(sharded=sys.argv[2] == "sharded"))
for _ in range(8):
    one_step(job)
leave(called(job))
end()
