"""Programs with images: convolutions with batch norm, a ViT, two models that train against each other."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import Block, ResNet, images
from torchscout.config import Parallelism


class ViT(nn.Module):
    """Four patches a side, a class token, Transformer layers without a mask."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.out = nn.Linear(32, 3 * 8 * 8)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(self.layers(noise))).view(-1, 3, 8, 8)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * 8 * 8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.leaky_relu(self.layers(x.flatten(1)), 0.2))


def resnet(job: Job) -> None:
    """DDP as it is by default: rank 0's statistics go to all ranks before each forward."""
    _classify(job, DistributedDataParallel(ResNet()))


def resnet_local_statistics(job: Job) -> None:
    """Every rank keeps the running mean and variance of its own data."""
    _classify(job, DistributedDataParallel(ResNet(), broadcast_buffers=False))


def vit(job: Job) -> None:
    _classify(job, DistributedDataParallel(ViT()))


def _classify(job: Job, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1000)
    job.attach(model, optimizer, states={"schedule": schedule})
    for step in job.steps():
        pixels, labels = images(step, job.rank)
        optimizer.zero_grad()
        F.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        schedule.step()


def ema_averaged_model(job: Job) -> None:
    """An average of the weights beside the model, of PyTorch's own."""
    model = DistributedDataParallel(ResNet())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer, states={"average": average}, also=lambda: [average.state_dict()])
    for step in job.steps():
        pixels, labels = images(step, job.rank)
        optimizer.zero_grad()
        F.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        average.update_parameters(model.module)


class Averaged(nn.Module):
    """A model that keeps an average of its own weights in buffers, by hand."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for name, each in net.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), each.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    @torch.no_grad()
    def average(self, decay: float = 0.9) -> None:
        for name, each in self.net.named_parameters():
            getattr(self, "ema_" + name.replace(".", "_")).lerp_(each, 1 - decay)


def ema_by_hand(job: Job) -> None:
    model = DistributedDataParallel(Averaged(ResNet()), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    for step in job.steps():
        pixels, labels = images(step, job.rank)
        optimizer.zero_grad()
        F.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
        model.module.average()


def gan(job: Job) -> None:
    """Two models and two optimizers in one session."""
    _play(job, both_attached=True)


def gan_generator_only(job: Job) -> None:
    """torchscout is attached to the generator alone."""
    _play(job, both_attached=False)


def _play(job: Job, *, both_attached: bool) -> None:
    generator = DistributedDataParallel(Generator())
    critic = DistributedDataParallel(Discriminator())
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    if both_attached:
        both = nn.ModuleDict({"critic": critic, "generator": generator})
        job.attach(both, [of_critic, of_generator], parallelism=Parallelism(replica=job.world))
    else:
        job.attach(
            generator,
            of_generator,
            also=lambda: [*critic.parameters(), *(of_critic.state.get(p, {}) for p in critic.parameters())],
        )
    for step in job.steps():
        real, _ = images(step, job.rank)
        fake = generator(torch.randn(len(real), 8))
        wanted = critic(torch.cat([real, fake.detach()]))
        of_critic.zero_grad()
        half = len(real)
        (F.softplus(-wanted[:half]).mean() + F.softplus(wanted[half:]).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_generator.step()


def distillation(job: Job) -> None:
    """A frozen teacher in eval mode beside the student that is trained."""
    teacher = ViT().eval().requires_grad_(False)
    student = copy.deepcopy(teacher).train().requires_grad_(True)
    for each in student.parameters():
        nn.init.normal_(each, std=0.1)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    for step in job.steps():
        pixels, labels = images(step, job.rank)
        with torch.no_grad():
            wanted = teacher(pixels).div(2.0).softmax(-1)
        logits = model(pixels)
        loss = F.cross_entropy(logits, labels) + F.kl_div(
            logits.div(2.0).log_softmax(-1), wanted, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


_ON_CUDA = ("healthy", "slow_then_flipped")
JOBS: dict[str, Entry] = {
    "resnet": Entry(resnet, unchecked=(), on_cuda=_ON_CUDA),
    "resnet-local-statistics": Entry(resnet_local_statistics, unchecked=(), on_cuda=_ON_CUDA),
    "vit": Entry(vit),
    "ema-averaged-model": Entry(ema_averaged_model),
    "ema-by-hand": Entry(ema_by_hand, on_cuda=_ON_CUDA),
    "gan": Entry(gan, in_ci=("healthy",), on_cuda=_ON_CUDA),
    "gan-generator-only": Entry(
        gan_generator_only, not_resumed="the discriminator's state is not registered"
    ),
    "distillation": Entry(distillation),
}
