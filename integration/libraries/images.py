"""timm, torchvision and kornia: models, optimizers, operators of detection, filters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

MODELS = ("resnet10t", "mobilenetv3_small_050", "edgenext_xx_small", "ghostnet_050")
OPTIMIZERS = ("lamb", "adamp", "lion", "adafactor", "madgrad", "nadamw", "adan", "muon")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def timm_models(device: str) -> Iterator[tuple[str, Tensor]]:
    import timm

    for name in MODELS:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=7).to(device).eval()
        scores = model(_random(2, 3, 64, 64).to(device))
        F.cross_entropy(scores, torch.tensor([1, 3], device=device)).backward()
        yield name, scores.detach()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        yield f"gradients of {name}", torch.stack(norms)


def timm_optimizers(device: str) -> Iterator[tuple[str, Tensor]]:
    import timm
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    for name in OPTIMIZERS:
        torch.manual_seed(0)
        model = timm.create_model("resnet10t", num_classes=5).to(device)
        optimizer = create_optimizer_v2(model, opt=name, lr=1e-3, weight_decay=0.01)
        average = ModelEmaV3(model, decay=0.9)
        for step in range(3):
            images, target = _random(4, 3, 32, 32, seed=step), _random(4, 5, seed=step).softmax(-1)
            loss = SoftTargetCrossEntropy()(model(images.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0, mode="agc")
            optimizer.step()
            average.update(model)
            yield f"{name}, step {step}", loss.detach()
        yield f"{name}, average", torch.stack([p.norm() for p in average.module.parameters()])


def torchvision_operators(device: str) -> Iterator[tuple[str, Tensor]]:
    import torchvision.ops as ops

    boxes, scores = _random(30, 4) * 50, _random(30, seed=1).to(device)
    boxes[:, 2:] += boxes[:, :2] + 1
    boxes = boxes.to(device)
    yield "nms", ops.nms(boxes, scores, 0.5)
    yield "batched_nms", ops.batched_nms(boxes, scores, torch.arange(30, device=device) % 3, 0.5)
    yield "generalized_box_iou", ops.generalized_box_iou(boxes, boxes)
    images = _random(2, 4, 20, 20).to(device).requires_grad_()
    regions = torch.cat([torch.zeros(5, 1, device=device), boxes[:5] / 5], 1)
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"):
        found = getattr(ops, name)(images, regions, 2)
        (gradient,) = torch.autograd.grad(found.square().sum(), images)
        yield name, found.detach()
        yield f"gradient of {name}", gradient
    weight, offsets = _random(6, 4, 3, 3).to(device), _random(2, 18, 20, 20).to(device)
    yield "deform_conv2d", ops.deform_conv2d(images, offsets, weight, padding=1).detach()


def torchvision_detection(device: str) -> Iterator[tuple[str, Tensor]]:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None, "min_size": 96, "max_size": 128}
    model = fasterrcnn_mobilenet_v3_large_320_fpn(num_classes=4, **options).to(device).eval()
    with torch.no_grad():
        (found,) = model([_random(3, 90, 110).to(device)])
    yield from found.items()


def kornia_filters(device: str) -> Iterator[tuple[str, Tensor]]:
    import kornia

    images = _random(2, 3, 32, 40).to(device)
    yield "median", kornia.filters.median_blur(images, (3, 3))
    yield "bilateral", kornia.filters.bilateral_blur(images, (3, 3), 0.1, (1.0, 1.0))
    yield "canny", kornia.filters.canny(images)[1]
    yield "lab", kornia.color.rgb_to_lab(images)
    yield "rotate", kornia.geometry.rotate(images, torch.tensor([30.0, 45.0], device=device))
    yield "dilation", kornia.morphology.dilation(images, torch.ones(3, 3, device=device))
    yield "equalize", kornia.enhance.equalize(images)
    yield "harris", kornia.feature.harris_response(images)
    yield "ssim", kornia.metrics.ssim(images, images * 0.9, 5)
