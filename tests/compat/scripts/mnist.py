"""A program for MS-AMP with the structure of its MNIST example: a scaler, autocast, a schedule, and one line of msamp's."""

import argparse

import msamp
import torch
import torch.nn.functional as F
from digits import digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 2)
        self.conv2 = nn.Conv2d(4, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 25, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, device, loader, optimizer, scaler):
    model.train()
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.amp.autocast(device.type):
            output = model(data)
        loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    correct = 0
    for data, target in loader:
        with torch.amp.autocast(device.type):
            output = model(data.to(device))
        correct += int((output.argmax(dim=1) == target.to(device)).sum())
    print(f"accuracy {correct / len(loader.dataset):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--enable-msamp", action="store_true")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--save-model")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = torch.utils.data.DataLoader(digits(1024), batch_size=64, shuffle=True)
    test_loader = torch.utils.data.DataLoader(digits(256, seed=1), batch_size=256)

    model = Net().to(device)
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    if args.enable_msamp:
        model, optimizer = msamp.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    scaler = torch.amp.GradScaler(device.type)
    for _ in range(args.epochs):
        train(model, device, train_loader, optimizer, scaler)
        scheduler.step()
    test(model, device, test_loader)
    print(f"optimizer {type(optimizer).__name__} weight {type(model.fc1.weight).__name__} lr {scheduler.get_last_lr()[0]:.2e}")
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
