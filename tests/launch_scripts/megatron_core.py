"""Megatron-Core, with its own data parallelism and optimizer, which has the state in shards or not."""

import sys

import torch.distributed as dist
from digest import end, leave

from evaluation.jobs.megatron import Setup, build, one_step

dist.init_process_group("gloo")
job = build(Setup(sharded=sys.argv[2] == "sharded"))
for step in range(1, 9):
    one_step(job, step)
leave(job.called)
end()
