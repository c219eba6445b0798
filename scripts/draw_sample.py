"""Draw the sample set of the quickstart: a folder of small pictures and the manifest that lists them.

    python scripts/draw_sample.py FOLDER

Fourteen rows, one for each thing an image collection tends to hold: photographs (upright, portrait, turned by EXIF,
progressive), transparency, a palette, grayscale, CMYK, one bit per pixel, an animation, WebP, a panorama that is wider
than the model allows, a damaged file, and a second question about a picture that was there before. Nothing is
downloaded, and the same versions of Pillow and numpy draw the same bytes.

A canvas is a float array [h, w, 3] of 0..255; a mask is [h, w] of 0..1; a field is [h, w] of any numbers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = NDArray[np.float64]
Colour = tuple[float, float, float]

EXIF_ORIENTATION = 0x0112


# --- brushes -------------------------------------------------------------------------------------------------------


def coordinates(width: int, height: int) -> tuple[Array, Array]:
    """The x and y of every pixel, each [h, w]."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    return x, y


def noise(seed: int, width: int, height: int, cell: float, octaves: int = 4, stretch: float = 1.0) -> Array:
    """Smooth value noise in 0..1: random grids, each twice as fine and half as strong as the one before.

    `cell` is the size of the largest blobs in pixels, `stretch` their width over their height.
    """
    rng = np.random.default_rng(seed)
    total, weight = np.zeros((height, width)), 0.0
    for octave in range(octaves):
        side = cell / 2**octave
        rows, cols = math.ceil(height / side) + 2, math.ceil(width / (side * stretch)) + 2
        grid = Image.fromarray(rng.random((rows, cols)).astype(np.float32))
        total += np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64) / 2**octave
        weight += 1 / 2**octave
    return np.clip(total / weight, 0.0, 1.0)


def soft(distance: Array, edge: float = 1.5) -> Array:
    """A mask from a signed distance in pixels: 1 inside (negative), 0 outside, `edge` pixels of transition."""
    return np.clip(0.5 - distance / edge, 0.0, 1.0)


def ellipse(x: Array, y: Array, cx: float, cy: float, rx: float, ry: float) -> Array:
    """Signed distance (near enough) to an ellipse."""
    return (np.hypot((x - cx) / rx, (y - cy) / ry) - 1.0) * min(rx, ry)


def capsule(x: Array, y: Array, start: tuple[float, float], end: tuple[float, float]) -> Array:
    """Distance to a line segment."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = np.clip(((x - start[0]) * dx + (y - start[1]) * dy) / (dx * dx + dy * dy), 0.0, 1.0)
    return np.hypot(x - start[0] - along * dx, y - start[1] - along * dy)


def polygon(width: int, height: int, points: list[tuple[float, float]]) -> Array:
    """The mask of a filled polygon, four samples a pixel along each axis."""
    large = Image.new("L", (width * 4, height * 4))
    ImageDraw.Draw(large).polygon([(px * 4, py * 4) for px, py in points], fill=255)
    return np.asarray(large.resize((width, height), Image.Resampling.BOX), dtype=np.float64) / 255


def gradient(position: Array, stops: list[tuple[float, Colour]]) -> Array:
    """Colours [h, w, 3] for a field, interpolated between `stops` (position, colour)."""
    places = [place for place, _ in stops]
    return np.stack([np.interp(position, places, [colour[c] for _, colour in stops]) for c in range(3)], axis=-1)


def paint(canvas: Array, mask: Array, colour: Colour | Array) -> None:
    """Lay a colour, or a picture of the canvas's size, over the canvas where the mask says so."""
    canvas += mask[..., None] * (np.asarray(colour) - canvas)


def glow(canvas: Array, strength: Array, colour: Colour) -> None:
    """Add light."""
    canvas += strength[..., None] * np.asarray(colour)


def finish(canvas: Array, seed: int, grain: float = 3.0) -> Image.Image:
    """The canvas as an RGB image, with a little sensor noise."""
    height, width = canvas.shape[:2]
    speck = np.random.default_rng(seed).normal(0.0, grain, (height, width, 1))
    return Image.fromarray(np.clip(canvas + speck, 0, 255).astype(np.uint8))


def ball(canvas: Array, centre: tuple[float, float], radii: tuple[float, float], colour: Colour, skin: Array) -> None:
    """A round thing lit from the upper left; `skin` is a field around 0 that mottles its colour."""
    height, width = canvas.shape[:2]
    x, y = coordinates(width, height)
    nx, ny = (x - centre[0]) / radii[0], (y - centre[1]) / radii[1]
    nz = np.sqrt(np.clip(1.0 - nx * nx - ny * ny, 0.0, 1.0))
    light = np.clip(-0.48 * nx - 0.58 * ny + 0.66 * nz, 0.0, 1.0)
    shade = 0.30 + 0.80 * light + skin * 0.35
    picture = np.asarray(colour) * shade[..., None] + 190.0 * (light**28)[..., None]
    paint(canvas, soft(ellipse(x, y, *centre, *radii)), picture)


# --- photographs ---------------------------------------------------------------------------------------------------


def landscape() -> Image.Image:
    """Evening light over rows of hills, a meadow in front."""
    width, height = 1024, 683
    x, y = coordinates(width, height)
    canvas = gradient(y / height, [(0, (62, 98, 158)), (0.3, (142, 168, 196)), (0.55, (250, 206, 150))])
    clouds = noise(11, width, height, 130, 5, stretch=3.5)
    paint(canvas, np.clip((clouds - 0.5) * 3.2, 0, 0.85) * np.clip(1.3 - y / 330, 0, 1), (255, 232, 214))
    distance = np.hypot(x - 690, y - 196)
    glow(canvas, np.exp(-distance / 120), (110, 78, 30))
    paint(canvas, soft(distance - 27, 5), (255, 246, 216))
    far, near = np.array((188, 168, 172)), np.array((38, 62, 44))
    for layer in range(6):
        depth = layer / 5
        ridge = noise(20 + layer, width, 1, 260 - 30 * layer, 5)[0]
        top = 318 + 50 * layer - (150 - 14 * layer) * (ridge - 0.4)
        texture = (noise(30 + layer, width, height, 14 + 8 * layer, 4, stretch=2) - 0.5) * 44 * depth
        hills = (far + depth * (near - far)) + texture[..., None] + 26 * (1 - depth) * ((y - top) / 200)[..., None]
        paint(canvas, soft(top - y), hills)
    meadow = np.clip((y - 575) / 108, 0, 1)
    grass = noise(41, width, height, 10, 3, stretch=0.25)
    paint(canvas, meadow * 0.85, gradient(grass, [(0.2, (30, 48, 22)), (0.8, (128, 138, 58))]))
    for fx, fy, size in np.random.default_rng(42).random((90, 3)) * (width, 1, 1):
        cy = 600 + 80 * fy
        box = np.s_[int(cy) - 5 : int(cy) + 6, max(0, int(fx) - 5) : int(fx) + 6]
        paint(canvas[box], soft(np.hypot(x[box] - fx, y[box] - cy) - 1 - 2.4 * fy), (240, 190 + 50 * size, 80 * size))
    return finish(canvas, 43)


def still_life() -> Image.Image:
    """A bowl of fruit on a table."""
    width, height = 480, 640
    x, y = coordinates(width, height)
    wall = np.hypot(x - 150, y - 120) / 620 + 0.08 * (noise(51, width, height, 90) - 0.5)
    canvas = gradient(wall, [(0, (196, 186, 160)), (0.5, (120, 116, 100)), (1, (44, 44, 44))])
    grain = noise(52, width, height, 9, 4, stretch=14)
    light = np.clip(1.15 - np.hypot(x - 180, y - 500) / 700, 0.4, 1.1)
    wood = gradient(grain, [(0.2, (92, 54, 30)), (0.8, (176, 116, 70))]) * light[..., None]
    paint(canvas, soft(430 - y, 3), wood)
    paint(canvas, 0.75 * soft(ellipse(x, y, 275, 560, 200, 40), 44), (28, 16, 10))
    mottle = noise(53, width, height, 16) - 0.5
    none = np.zeros((height, width))
    paint(canvas, soft(ellipse(x, y, 240, 425, 176, 34)), (70, 78, 92))
    for centre, radii, colour, skin in [
        ((240.0, 330.0), (68.0, 66.0), (226, 128, 28), mottle * 0.5),
        ((320.0, 372.0), (66.0, 64.0), (172, 28, 34), mottle),
        ((150.0, 370.0), (64.0, 62.0), (128, 150, 44), mottle),
        ((232.0, 402.0), (62.0, 46.0), (236, 200, 52), mottle * 0.4),
    ]:
        ball(canvas, centre, radii, colour, skin)
    for px, py in [(352, 410), (326, 420), (372, 432), (346, 440), (318, 448), (300, 428)]:
        ball(canvas, (float(px), float(py)), (17.0, 17.0), (72, 34, 92), none)
    for top, lean in [((322.0, 318.0), 12.0), ((150.0, 317.0), -8.0)]:
        paint(canvas, soft(capsule(x, y, top, (top[0] + lean, top[1] - 30)) - 3), (64, 42, 26))
    front = np.maximum(ellipse(x, y, 240, 425, 178, 122), -ellipse(x, y, 240, 420, 190, 36))
    front = np.maximum(front, 425 - y)  # the half of the bowl that faces us
    glaze = gradient((x - 60) / 360, [(0, (96, 128, 168)), (0.25, (206, 222, 236)), (1, (34, 56, 96))])
    glaze += 30 * (np.sin((x - 240) / 14) * np.sin(y / 14) > 0.55)[..., None]
    paint(canvas, soft(front), glaze * np.clip(1.25 - (y - 425) / 260, 0.5, 1.2)[..., None])
    return finish(canvas, 54, grain=2.5)


def lighthouse() -> Image.Image:
    """A lighthouse on a cliff: upright, so that a picture lying on its side is seen to lie."""
    width, height = 480, 640
    x, y = coordinates(width, height)
    canvas = gradient(y / height, [(0, (58, 122, 190)), (0.62, (196, 222, 236))])
    clouds = noise(61, width, height, 110, 5, stretch=2.4)
    paint(canvas, np.clip((clouds - 0.52) * 4, 0, 0.95), (252, 252, 250))
    waves = noise(62, width, height, 7, 3, stretch=8)
    sea = gradient(waves * 0.6 + (y - 420) / 550, [(0.1, (96, 156, 178)), (0.8, (14, 64, 92))])
    paint(canvas, soft(420 - y), sea)
    edge = noise(63, width, 1, 60, 5)[0]
    cliff = 470 - 130 * np.clip((x - 130) / 180, 0, 1) ** 0.6 - 40 * (edge - 0.5) + 260 * np.clip((150 - x) / 90, 0, 2)
    rock = gradient(noise(64, width, height, 60, 6, stretch=0.6), [(0.25, (62, 54, 48)), (0.7, (168, 152, 128))])
    paint(canvas, soft(cliff - y), rock)
    paint(canvas, soft(cliff - y) * soft(y - cliff - 26 - 30 * edge, 16), (88, 128, 56))
    half = np.interp(y, [110, 380], [24, 42])
    tower = np.maximum(np.abs(x - 320) - half, np.maximum(112 - y, y - 372))
    stripes = np.where(((y - 112) // 52).astype(int) % 2 == 0, 1.0, 0.0)
    tint = gradient(stripes, [(0, (240, 238, 230)), (1, (196, 44, 40))])
    paint(canvas, soft(tower), tint * np.interp((x - 320) / half, [-1, -0.3, 1], [0.9, 1.05, 0.55])[..., None])
    for box, colour in [
        ((286, 100, 354, 114), (50, 52, 58)),
        ((300, 66, 340, 100), (250, 232, 150)),
        ((318, 66, 322, 100), (50, 52, 58)),
        ((310, 200, 326, 226), (44, 50, 66)),
    ]:
        left, top, right, bottom = box
        paint(canvas, soft(np.maximum(np.maximum(left - x, x - right), np.maximum(top - y, y - bottom))), colour)
    paint(canvas, polygon(width, height, [(292, 68), (348, 68), (320, 36)]), (170, 36, 34))
    return finish(canvas, 65)


def harbour() -> Image.Image:
    """Sailing boats at dusk, mirrored in the water."""
    width, height, horizon = 640, 427, 232
    x, y = coordinates(width, height)
    sky = [(0, (38, 40, 88)), (0.3, (120, 72, 120)), (0.45, (226, 122, 96)), (0.545, (255, 196, 120))]
    canvas = gradient(y / height, sky)
    paint(canvas, np.clip((noise(71, width, height, 90, 5, stretch=5) - 0.5) * 3, 0, 0.7), (255, 158, 128))
    shore = horizon - 16 - 46 * np.clip(noise(72, width, 1, 120, 5)[0] - 0.3, 0, 1)
    paint(canvas, soft(shore - y), (58, 42, 74))
    for hull, length, colour in [(150, 62, (246, 236, 220)), (395, 92, (250, 220, 190)), (540, 44, (220, 196, 196))]:
        deck = horizon + length * 0.1
        mast = [(hull, deck - length * 1.5), (hull + length * 0.48, deck - 6), (hull, deck - 6)]
        jib = [(hull - 3, deck - length * 1.3), (hull - 3, deck - 6), (hull - length * 0.36, deck - 6)]
        body = [
            (hull - length / 2, deck - 4),
            (hull + length / 2, deck - 4),
            (hull + length * 0.36, deck + length * 0.1),
        ]
        paint(canvas, polygon(width, height, mast), colour)
        paint(canvas, polygon(width, height, jib), tuple(0.82 * c for c in colour))
        paint(canvas, polygon(width, height, [*body, (hull - length * 0.36, deck + length * 0.1)]), (44, 28, 40))
    line = horizon + 18
    ripple = (noise(73, width, height, 6, 3, stretch=9) - 0.5) * np.clip((y - line) / 6, 0, 26)
    source_y = np.clip(2 * line - y + ripple * 1.6, 0, line - 1).astype(int)
    source_x = np.clip(x + ripple * 0.9, 0, width - 1).astype(int)
    mirror = canvas[source_y, source_x] * 0.74 + np.array((4, 8, 26))
    return finish(np.where((y >= line)[..., None], mirror, canvas), 74, grain=2.0)


def flower() -> Image.Image:
    """A daisy close up, the garden out of focus behind it."""
    width, height = 500, 500
    x, y = coordinates(width, height)
    canvas = gradient(
        noise(81, width, height, 160, 3), [(0.2, (22, 58, 26)), (0.6, (86, 132, 58)), (0.9, (176, 190, 92))]
    )
    for bx, by, size, warm in np.random.default_rng(82).random((16, 4)) * (width, height, 1, 1):
        paint(canvas, 0.28 * soft(np.hypot(x - bx, y - by) - 14 - 34 * size, 8), (225, 220 - 70 * warm, 130))
    paint(canvas, soft(capsule(x, y, (262, 270), (300, 520)) - 7, 4), (62, 104, 40))
    distance, angle = np.hypot(x - 250, (y - 235) * 1.1), np.arctan2((y - 235) * 1.1, x - 250)
    streaks = noise(83, width, height, 8, 3)
    for ring, (count, reach, tone) in enumerate([(17, 196, 0.80), (15, 182, 0.96)]):
        turn = angle / (2 * math.pi) * count + 0.5 * ring
        phase = (turn % 1.0 - 0.5) * 2  # -1..1 across one petal
        length = reach + 12 * np.sin((np.floor(turn) % count) * 2.3)
        wide = np.clip(np.sin(np.clip(distance / length, 0, 1) * math.pi) ** 0.35, 0.02, 1)
        body = np.maximum((np.abs(phase) / wide - 0.88) * distance * math.pi / count, distance - length)
        shade = tone * (1.0 - 0.22 * phase**2) - 0.10 * streaks - 0.25 * np.exp(-(distance - 46) / 30)
        paint(canvas, soft(body), np.array((252, 250, 255)) * np.clip(shade, 0, 1)[..., None])
    seeds = noise(84, width, height, 6, 2)
    dome = gradient(seeds + 0.35 * (1 - distance / 56), [(0.3, (150, 84, 10)), (0.9, (252, 204, 44))])
    paint(canvas, soft(distance - 54 - 6 * (seeds - 0.5), 3), dome)
    return finish(canvas, 85, grain=1.5)


def panorama() -> Image.Image:
    """A mountain range from daybreak to nightfall, wider than the 7,168 pixels a side may have."""
    width, height = 7600, 180
    x, y = coordinates(width, height)
    day = x / width
    high = gradient(day, [(0, (52, 56, 112)), (0.3, (84, 148, 214)), (0.65, (96, 156, 214)), (1, (14, 16, 46))])
    low = gradient(day, [(0, (250, 176, 128)), (0.25, (206, 226, 240)), (0.7, (236, 220, 196)), (0.85, (240, 130, 84)),
                         (1, (54, 44, 86))])  # fmt: skip
    canvas = high + (y / 130).clip(0, 1)[..., None] * (low - high)
    cloud = np.clip((noise(91, width, height, 80, 4, stretch=6) - 0.55) * 3, 0, 0.7)
    paint(canvas, cloud, low * 0.3 + 178)
    light = np.interp(day, [0, 0.25, 0.7, 1], [0.55, 1.0, 0.95, 0.28])[..., None]
    for layer, colour in enumerate([(150, 162, 186), (104, 118, 138), (60, 84, 72), (34, 52, 38)]):
        ridge = noise(92 + layer, width, 1, 420 - 80 * layer, 7)[0]
        top = 66 + 28 * layer - (110 - 18 * layer) * (ridge - 0.45)
        rock = np.asarray(colour) + (noise(97 + layer, width, height, 18, 4) - 0.5)[..., None] * 50
        paint(canvas, soft(top - y), rock * light)
        if layer == 0:
            paint(canvas, soft(top - y) * soft(y - top - 26 * ridge, 12), light * (244, 246, 252))
    return finish(canvas, 99, grain=1.5)


def moon() -> Image.Image:
    """The full moon; this is the picture that gets cut in half."""
    width, height = 512, 384
    x, y = coordinates(width, height)
    canvas = gradient(y / height, [(0, (6, 8, 22)), (1, (22, 26, 52))])
    for sx, sy, bright in np.random.default_rng(101).random((120, 3)) * (width, height, 1):
        glow(canvas, bright**3 * np.exp(-((x - sx) ** 2 + (y - sy) ** 2)), (255, 250, 236))
    seas = noise(102, width, height, 120, 6)
    distance = np.hypot(x - 262, y - 190)
    glow(canvas, np.exp(-np.clip(distance - 140, 0, None) / 26) * 0.4, (120, 124, 150))
    face = gradient(seas, [(0.35, (112, 110, 108)), (0.6, (226, 222, 208))])
    paint(canvas, soft(distance - 140, 3), face * np.clip(1.12 - (distance / 175) ** 4, 0, 1)[..., None])
    return finish(canvas, 103)


# --- graphics and documents ----------------------------------------------------------------------------------------


def logo() -> Image.Image:
    """A badge with a soft shadow on nothing: RGBA, every level of alpha."""
    size = 256
    x, y = coordinates(size, size)
    shadow = 0.45 * soft(np.hypot(x - 128, y - 138) - 96, 34)
    disc = soft(np.hypot(x - 128, y - 122) - 100)
    canvas = gradient((x + y) / (2 * size), [(0.2, (255, 150, 92)), (0.8, (150, 44, 140))])
    paint(canvas, soft(np.hypot(x - 160, y - 92) - 24), (255, 232, 178))
    peaks = [
        ([(20, 200), (98, 92), (176, 200)], (70, 40, 110)),
        ([(84, 206), (160, 122), (236, 206)], (44, 26, 82)),
        ([(98, 92), (122, 126), (104, 120), (92, 134), (76, 122)], (248, 240, 250)),
    ]
    for points, colour in peaks:
        paint(canvas, polygon(size, size, [(float(px), float(py)) for px, py in points]), colour)
    paint(canvas, soft(186 + 4 * np.sin(x / 9) - y), (30, 20, 62))
    alpha = disc + (1 - disc) * shadow
    colour = canvas * (disc / np.maximum(alpha, 1e-6))[..., None]
    rgba = np.concatenate([colour, 255 * alpha[..., None]], axis=-1)
    return Image.fromarray(np.clip(rgba, 0, 255).astype(np.uint8))


def chart() -> Image.Image:
    """A bar chart in nine colours, the background transparent: a palette image with a tRNS chunk."""
    image = Image.new("P", (480, 320), 0)
    image.putpalette([255, 255, 255, 34, 40, 49, 208, 212, 218, 38, 110, 184, 92, 158, 214, 240, 150, 40, 250, 196, 120,
                      200, 60, 60, 90, 98, 110])  # fmt: skip
    draw = ImageDraw.Draw(image)
    draw.fontmode = "1"
    draw.text((60, 14), "Rainfall, mm a month", fill=1, font=ImageFont.load_default(18))
    for step in range(5):
        level = 270 - 50 * step
        draw.line((56, level, 460, level), fill=2)
        draw.text((50, level), str(20 * step), fill=8, anchor="rm", font=ImageFont.load_default(12))
    months = {"Jan": (52, 70), "Feb": (40, 61), "Mar": (47, 49), "Apr": (63, 38), "May": (71, 30), "Jun": (88, 22)}
    for position, (month, (north, south)) in enumerate(months.items()):
        left = 72 + 66 * position
        draw.rectangle((left, 270 - north * 2.5, left + 22, 270), fill=3)
        draw.rectangle((left + 25, 270 - south * 2.5, left + 47, 270), fill=5)
        draw.text((left + 24, 286), month, fill=8, anchor="mm", font=ImageFont.load_default(13))
    draw.line((56, 270, 460, 270), fill=1, width=2)
    for left, colour, name in [(300, 3, "north"), (380, 5, "south")]:
        draw.rectangle((left, 20, left + 12, 32), fill=colour)
        draw.text((left + 18, 26), name, fill=8, anchor="lm", font=ImageFont.load_default(13))
    return image


def x_ray() -> Image.Image:
    """The bones of a left hand, in 256 grays."""
    width, height = 400, 480
    x, y = coordinates(width, height)
    flesh, bone = np.full((height, width), np.inf), np.full((height, width), np.inf)
    for angle, reach, knuckle in [(-58, 150, 60), (-17, 216, 112), (-3, 236, 114), (10, 220, 108), (25, 178, 98)]:
        dx, dy = math.sin(math.radians(angle)), -math.cos(math.radians(angle))
        root = (205 + 62 * dx, 372 + 26 * dy) if angle > -58 else (176.0, 372.0)
        marks = [0.0, *(knuckle + (reach - knuckle) * part for part in (0.0, 0.48, 0.78, 1.0))]
        for start, end in pairwise(marks):
            if end == start or (angle == -58 and end == reach):
                continue
            tail = (root[0] + (start + 7) * dx, root[1] + (start + 7) * dy)
            head = (root[0] + (end - 7) * dx, root[1] + (end - 7) * dy)
            along = np.minimum(np.hypot(x - tail[0], y - tail[1]), np.hypot(x - head[0], y - head[1]))
            bone = np.minimum(bone, capsule(x, y, tail, head) - 6.5 - 4.5 * np.exp(-along / 9))
        flesh = np.minimum(flesh, capsule(x, y, root, (root[0] + reach * dx, root[1] + reach * dy)) - 21)
    for cx, cy in [(176, 386), (198, 378), (222, 380), (240, 392), (180, 408), (204, 404), (228, 412)]:
        bone = np.minimum(bone, ellipse(x, y, cx, cy, 12, 11))
    for start, end, thick in [((188, 442), (182, 500), 16), ((230, 444), (232, 500), 11)]:
        bone = np.minimum(bone, capsule(x, y, start, end) - thick)
    flesh = np.minimum(flesh, ellipse(x, y, 208, 340, 74, 92))
    flesh = np.minimum(flesh, capsule(x, y, (206, 400), (206, 520)) - 52)
    level = 10 + 62 * soft(flesh + 6, 26) + 22 * soft(flesh + 34, 60)
    shaft = 96 + 74 * np.exp(-np.abs(bone + 2) / 3.5)
    level += soft(bone, 3) * shaft + 14 * (noise(111, width, height, 40) - 0.5)
    level += np.random.default_rng(112).normal(0, 2, level.shape)
    image = Image.fromarray(np.clip(level, 0, 255).astype(np.uint8))
    ImageDraw.Draw(image).text((30, 26), "L", fill=230, font=ImageFont.load_default(34))
    return image


def poster() -> Image.Image:
    """A concert poster in printing inks: CMYK."""
    width, height, scale = 420, 594, 3
    paper, ink, red, blue, yellow = (2, 4, 14, 0), (30, 20, 20, 92), (6, 92, 88, 2), (92, 62, 8, 6), (2, 22, 94, 0)
    image = Image.new("CMYK", (width * scale, height * scale), _ink(paper))
    draw = ImageDraw.Draw(image)
    for shape, box, colour in [
        (draw.ellipse, (120, 60, 420, 360), red),
        (draw.rectangle, (0, 250, 250, 430), blue),
        (draw.ellipse, (30, 180, 190, 340), yellow),
        (draw.ellipse, (70, 220, 150, 300), paper),
        (draw.rectangle, (250, 330, 420, 342), ink),
        (draw.rectangle, (250, 354, 420, 360), ink),
        (draw.rectangle, (250, 372, 420, 375), ink),
    ]:
        shape(tuple(scale * side for side in box), fill=_ink(colour))
    draw.polygon([(scale * px, scale * py) for px, py in [(250, 430), (420, 260), (420, 430)]], fill=_ink(ink))
    for place, text, size in [((28, 446), "night music", 62), ((30, 522), "strings, brass and a tape machine", 21)]:
        font = ImageFont.load_default(size * scale)
        draw.text((place[0] * scale, place[1] * scale), text, fill=_ink(ink), font=font)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _ink(percent: tuple[int, int, int, int]) -> tuple[int, ...]:
    return tuple(round(part * 2.55) for part in percent)


def scanned_page() -> Image.Image:
    """A typed page, scanned slightly askew in black and white: one bit per pixel."""
    text = (
        "A picture reaches the model as small squares. Each is fourteen pixels wide and fourteen high, and the "
        "squares are read row by row, like the words on this page. Four neighbours are then merged into one, and "
        "what is left is what the language model sees in the place of the picture.\n"
        "Where the width is no multiple of twenty-eight, black is added on the right; where the height is not, at "
        "the foot. Nothing is cropped. A very large picture is made smaller first, until it holds no more squares "
        "than the limit allows, and neither side is longer than five hundred and twelve of them.\n"
        "So the work is the same each time, and there is no need to do it twice."
    )
    scale, font = 2, ImageFont.load_default(30)
    page = Image.new("L", (640 * scale, 800 * scale), 246)
    draw = ImageDraw.Draw(page)
    draw.text((140, 130), "On squares", fill=20, font=ImageFont.load_default(52))
    top = 250
    for paragraph in text.split("\n"):
        line = ""
        for word in [*paragraph.split(), ""]:
            if not word or draw.textlength(f"{line} {word}", font=font) > 1000:
                draw.text((140, top), line, fill=30, font=font)
                top, line = top + 48, word
            else:
                line = f"{line} {word}".strip()
        top += 30
    turned = page.rotate(0.9, Image.Resampling.BICUBIC, fillcolor=246).filter(ImageFilter.GaussianBlur(1.1))
    gray = np.asarray(turned.resize((640, 800), Image.Resampling.BOX), dtype=np.float64)
    gray += np.random.default_rng(121).normal(0, 16, gray.shape) - 46 * (noise(122, 640, 800, 5, 2) > 0.86)
    return Image.fromarray(np.clip(gray, 0, 255).astype(np.uint8)).point(lambda level: 255 * (level > 170), "1")


def bouncing_ball() -> list[Image.Image]:
    """Ten frames of a ball that bounces; only the first one counts."""
    frames = []
    for step in range(10):
        canvas = gradient(coordinates(200, 160)[1] / 160, [(0, (250, 244, 226)), (0.8, (232, 214, 180))])
        x, y = coordinates(200, 160)
        paint(canvas, soft(132 - y), (122, 150, 128))
        rise = 84 * (1 - (2 * ((step / 10 + 0.27) % 1.0) - 1) ** 2)
        paint(canvas, 0.5 * soft(ellipse(x, y, 100, 140, 30 - rise / 6, 7), 6), (40, 60, 50))
        ball(canvas, (100.0, 114.0 - rise), (26.0, 26.0), (222, 70, 60), np.zeros((160, 200)))
        frames.append(finish(canvas, 0, grain=0.0).quantize(48, dither=Image.Dither.NONE))
    return frames


# --- files ---------------------------------------------------------------------------------------------------------


def write_phone_photo(path: Path) -> None:
    """As a telephone stores an upright photograph: lying on its side, with a note on how to turn it."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    lighthouse().transpose(Image.Transpose.ROTATE_90).save(path, quality=82, exif=exif)


def write_animation(path: Path) -> None:
    first, *others = bouncing_ball()
    first.save(path, save_all=True, append_images=others, duration=80, loop=0)


def write_cut_off(path: Path) -> None:
    """A download that stopped half-way."""
    buffer = BytesIO()
    moon().save(buffer, "JPEG", quality=82)
    path.write_bytes(buffer.getvalue()[: buffer.tell() // 2])


FILES: dict[str, Callable[[Path], None]] = {
    "landscape.jpg": lambda path: landscape().save(path, quality=82),
    "still-life.jpg": lambda path: still_life().save(path, quality=84),
    "phone-photo.jpg": write_phone_photo,
    "harbour.jpg": lambda path: harbour().save(path, quality=82, progressive=True),
    "logo.png": lambda path: logo().save(path),
    "chart.png": lambda path: chart().save(path, transparency=0),
    "x-ray.png": lambda path: x_ray().save(path),
    "poster.jpg": lambda path: poster().save(path, quality=85),
    "ball.gif": write_animation,
    "page.png": lambda path: scanned_page().save(path),
    "flower.webp": lambda path: flower().save(path, quality=80),
    "panorama.jpg": lambda path: panorama().save(path, quality=78),
    "cut-off.jpg": write_cut_off,
}

ROWS = [
    {"id": "landscape", "image": "landscape.jpg", "caption": "Rows of hills in the evening sun"},
    {"id": "still-life", "image": "still-life.jpg", "caption": "A bowl with apples, an orange, a lemon and grapes"},
    {"id": "phone-photo", "image": "phone-photo.jpg", "caption": "A lighthouse; stored sideways with an EXIF note"},
    {"id": "harbour", "image": "harbour.jpg", "caption": "Three sailing boats at dusk"},
    {"id": "logo", "image": "logo.png", "caption": "A badge with two peaks and a soft shadow"},
    {"id": "chart", "image": "chart.png", "caption": "Rainfall from January to June, north and south"},
    {"id": "x-ray", "image": "x-ray.png", "caption": "X-ray of a hand"},
    {"id": "poster", "image": "poster.jpg", "caption": "A concert poster"},
    {"id": "ball", "image": "ball.gif", "caption": "A red ball that bounces"},
    {"id": "page", "image": "page.png", "caption": "A typed page about squares"},
    {"id": "flower", "image": "flower.webp", "caption": "A daisy"},
    {"id": "panorama", "image": "panorama.jpg", "caption": "A mountain range from daybreak to nightfall"},
    {"id": "cut-off", "image": "cut-off.jpg", "caption": "The moon; the file ends half-way"},
    {"id": "landscape-again", "image": "landscape.jpg", "caption": "How many rows of hills are there?"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the quickstart's sample pictures and their manifest.")
    parser.add_argument("folder", type=Path, help="where to put them; made if absent")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in FILES.items():
        write(folder / name)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS]
    (folder / "manifest.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(FILES)} pictures and a manifest of {len(ROWS)} rows are in {folder}")


if __name__ == "__main__":
    main()
