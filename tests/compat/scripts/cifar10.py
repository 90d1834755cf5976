"""A program for MS-AMP with the structure of its CIFAR10 example: DeepSpeed's engine, with a configuration of its own."""

import argparse

import torch
import torch.nn.functional as F
from digits import digits
from msamp import deepspeed
from torch import nn


def add_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--save")
    return deepspeed.add_config_arguments(parser).parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 128)
        self.fc2 = nn.Linear(128, 96)
        self.fc3 = nn.Linear(96, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        return self.fc3(F.relu(self.fc2(x)))


def main():
    args = add_argument()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    trainset = digits(768, channels=3, size=32)
    engine, _, trainloader, _ = deepspeed.initialize(args=args, model=Net(), training_data=trainset)
    fp16 = engine.fp16_enabled()
    criterion = nn.CrossEntropyLoss()
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(engine.device), data[1].to(engine.device)
            if fp16:
                inputs = inputs.half()
            loss = criterion(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
    images, labels = digits(256, channels=3, size=32, seed=5).tensors
    engine.eval()
    with torch.no_grad():
        accuracy = (engine(images.to(engine.device)).argmax(dim=1) == labels.to(engine.device)).float().mean()
    weights = sum(float(value.float().sum()) for value in engine.module.state_dict().values())
    rank = torch.distributed.get_rank()
    # Each line is one write: beside another rank's, print's own end of a line is a second.
    print(
        f"rank {rank} loss {loss.item():.4f} accuracy {accuracy:.4f} steps {engine.global_steps} lr {engine.get_lr()[0]:.2e}\n",
        end="",
    )
    print(
        f"rank {rank} weight {type(engine.module.fc1.weight).__name__} codes {engine.module.fc1.weight.codes.dtype}\n", end=""
    )
    print(f"rank {rank} level {engine.module.octet_report.level} weights {weights!r}\n", end="")
    if args.save:
        engine.save_checkpoint(args.save, client_state={"epochs": args.epochs})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
