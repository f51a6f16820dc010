"""A LightningModule, trained by Lightning's Trainer under DDP with automatic optimization."""

import torch
from digest import end, leave
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = (self.layers(batch[0]) - batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, **quiet)
rows = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
trainer.fit(module, DataLoader(rows, batch_size=4))
leave(module, trainer.optimizers, module.losses)
end()
