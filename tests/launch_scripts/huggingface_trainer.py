"""A small causal language model, trained by the Trainer of transformers."""

import sys

import torch
from digest import end, leave
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 48, (16,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=48, num_key_value_heads=2, attention_dropout=0.1, **sizes))
arguments = TrainingArguments(
    output_dir=f"{sys.argv[1]}/trainer",
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    save_strategy="no",
    logging_strategy="no",
    use_cpu=True,
    ddp_backend="gloo",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=Rows())
result = trainer.train()
leave(model, [trainer.optimizer.optimizer], [result.training_loss])
end()
