"""ResNet-50 and MobileNetV2, which classify images: the layers of their papers in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from models.resnet import shortcut


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, with batch norm, around a skip connection.

    Args:
        inputs: Channels of the input.
        width: Channels of the 3x3 convolution; the output has four times as many.
        stride: Of the 3x3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip = shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Module):
    """Deep Residual Learning for Image Recognition (2015), 50 layers.

    Args:
        classes: Number of labels.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(depth):
                blocks.append(Bottleneck(inputs, width, 1 if i else stride))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        return self.head(self.blocks(x).mean((2, 3)))


class Convolution(nn.Sequential):
    """A convolution, batch norm and ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        )


class InvertedResidual(nn.Module):
    """Widen, a 3x3 convolution of each channel by itself, narrow.

    Args:
        inputs, outputs: Channels.
        stride: Of the 3x3 convolution.
        expansion: How many times wider it is than the input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        layers = [Convolution(inputs, width)] if expansion > 1 else []
        self.layers = nn.Sequential(
            *layers,
            Convolution(width, width, 3, stride, groups=width),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


# Expansion, channels, number of blocks and stride of the first one, of each stage.
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """MobileNetV2: Inverted Residuals and Linear Bottlenecks (2018), of width 1.

    Args:
        classes: Number of labels.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [Convolution(3, 32, 3, 2)]
        inputs = 32
        for expansion, outputs, depth, stride in MOBILE_STAGES:
            for i in range(depth):
                layers.append(InvertedResidual(inputs, outputs, 1 if i else stride, expansion))
                inputs = outputs
        self.layers = nn.Sequential(*layers, Convolution(inputs, 1280))
        self.head = nn.Linear(1280, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images).mean((2, 3)))


def as_trained(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The model in evaluation mode, its batch norms with statistics other than 0 and 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.1 * torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    return model.eval()
