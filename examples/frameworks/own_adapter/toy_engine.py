"""A toy framework: an engine that has the model, the optimizer and the training step."""

import torch
import torch.distributed as dist


class Engine:
    """Trains replicas of a model, one on each rank."""

    def __init__(self, net: torch.nn.Module, rate: float = 1e-2) -> None:
        self.net = net
        self.solver = torch.optim.AdamW(net.parameters(), lr=rate)
        self.seen = 0

    def learn(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        for each in self.net.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        self.solver.step()
        self.solver.zero_grad()
        self.seen += tokens.numel()
        return loss.item()
