"""A program for MS-AMP with the structure of its Swin-Transformer example.

Windows of attention, a head that stays in fp32, groups without weight decay, accumulation, and a scaler that clips by msamp's
function. Under torchrun it wraps the model by torch's DDP.
"""

import argparse
import os

import msamp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import digits
from msamp import clip_grad_norm_
from torch import nn

WINDOW = 4


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, height, width, dim = x.shape
        windows = self.norm1(x).view(batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, dim)
        windows = windows.transpose(2, 3).reshape(-1, WINDOW * WINDOW, dim)
        query, key, value = self.qkv(windows).unflatten(-1, (3, self.heads, dim // self.heads)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        mixed = self.proj(mixed).view(batch, height // WINDOW, width // WINDOW, WINDOW, WINDOW, dim)
        x = x + mixed.transpose(2, 3).reshape(batch, height, width, dim)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Swin(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.layers = nn.Sequential(Block(dim, heads), Block(dim, heads))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        x = self.layers(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(x).mean(dim=(1, 2)))


class NativeScalerWithGradNormCount:
    def __init__(self, device):
        self._scaler = torch.amp.GradScaler(device.type)

    def __call__(self, loss, model, optimizer, clip_grad, parameters, update_grad):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        if hasattr(optimizer, "all_reduce_grads"):
            optimizer.all_reduce_grads(model)
        self._scaler.unscale_(optimizer)
        norm = clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def build_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, eps=1e-8, betas=(0.9, 0.999), lr=2e-3, weight_decay=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-msamp", action="store_true")
    parser.add_argument("--msamp-opt-level", default="O1")
    parser.add_argument("--clip-grad", type=float, default=5.0)
    parser.add_argument("--accumulation-steps", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank() if is_distributed else 0
    torch.manual_seed(1)

    model = Swin().to(device)
    model.head.use_fp32_linear = True
    optimizer = build_optimizer(model)
    if args.enable_msamp:
        model, optimizer = msamp.initialize(model, optimizer, args.msamp_opt_level)
    model_without_ddp = model
    if is_distributed:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    loss_scaler = NativeScalerWithGradNormCount(device)
    loader = torch.utils.data.DataLoader(digits(640, channels=3, size=32, seed=rank), batch_size=32)
    model.train()
    for _ in range(2):
        for index, (samples, targets) in enumerate(loader):
            with torch.amp.autocast(device.type):
                outputs = model(samples.to(device))
            loss = F.cross_entropy(outputs, targets.to(device)) / args.accumulation_steps
            is_last = (index + 1) % args.accumulation_steps == 0
            norm = loss_scaler(loss, model, optimizer, args.clip_grad, model.parameters(), is_last)
            if is_last:
                optimizer.zero_grad()
    model.eval()
    samples, targets = digits(256, channels=3, size=32, seed=7).tensors
    with torch.no_grad():
        accuracy = (model_without_ddp(samples.to(device)).argmax(dim=1) == targets.to(device)).float().mean()
    weights = sum(float(value.float().sum()) for value in model_without_ddp.state_dict().values())
    # Each line is one write: beside another rank's, print's own end of a line is a second.
    print(f"rank {rank} loss {args.accumulation_steps * loss.item():.4f} norm {norm:.4f} accuracy {accuracy:.4f}\n", end="")
    print(f"rank {rank} head {type(model_without_ddp.head).__name__} weights {weights!r}\n", end="")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
