"""Fourier transforms agree with numpy's in float64, with the scalings of the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import Device, Graph, Session

Array = npt.NDArray[Any]


def run(graph: Graph, device: Device, **feeds: Array) -> list[Array]:
    """Run strictly on the device: a transform needs no help from the CPU."""
    return Session(device).compile(graph).run(feeds)


def complex_data(*shape: int) -> npt.NDArray[np.complex128]:
    rng = np.random.default_rng(sum(shape))
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def blocks(values: npt.NDArray[np.complex128], dtype: str = "float32") -> Array:
    """Return complex values as `[re | im]` along the last axis."""
    return np.concatenate([values.real, values.imag], -1).astype(dtype)


def joined(values: Array) -> npt.NDArray[np.complex128]:
    re, im = np.split(values.astype(np.float64), 2, -1)
    return re + 1j * im


def error(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 65, 97, 131, 200, 1000, 1024, 1021, 4096])
def test_any_size_is_transformed_to_f32_accuracy(size: int, inverse: bool) -> None:
    """One product, products of divisors and large primes stay within 1e-6 in norm, unscaled both ways."""
    x, g = complex_data(3, size), Graph()
    g.outputs = [g.fft(g.input("x", ["rows", 2 * size]), inverse)]
    expected = np.fft.ifft(x) * size if inverse else np.fft.fft(x)
    assert error(joined(run(g, Device.CPU, x=blocks(x))[0]), expected) < 1e-6


@pytest.mark.parametrize("size", [5, 72, 131])
def test_every_device_transforms_alike(device: Device, size: int) -> None:
    """The three ways to write a transform run on every device."""
    x, g = complex_data(2, size), Graph()
    g.outputs = [g.fft(g.input("x", [2, 2 * size]))]
    assert error(joined(run(g, device, x=blocks(x))[0]), np.fft.fft(x)) < 1e-6


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("norm", ["backward", "forward", "ortho"])
def test_norms_scale_as_the_contract_says(norm: str, inverse: bool) -> None:
    """Backward scales nothing, forward the inverse by 1/N, ortho both ways by 1/sqrt(N)."""
    x, g = complex_data(2, 6), Graph()
    g.outputs = [g.fft_norm(g.input("x", [2, 12]), inverse, norm)]
    expected = np.fft.ifft(x) * 6 if inverse else np.fft.fft(x)
    expected = expected * {"backward": 1.0, "forward": 1 / 6 if inverse else 1.0, "ortho": 1 / np.sqrt(6)}[norm]
    assert error(joined(run(g, Device.CPU, x=blocks(x))[0]), expected) < 1e-6


def test_f64_is_transformed_in_f64() -> None:
    """A double transform is exact to 1e-13."""
    x, g = complex_data(2, 150), Graph()
    g.outputs = [g.fft(g.input("x", [2, 300], "f64"))]
    assert error(joined(run(g, Device.CPU, x=blocks(x, "float64"))[0]), np.fft.fft(x)) < 1e-13


def test_leading_axes_are_kept() -> None:
    """Axes before the last are rows, named or not."""
    x, g = complex_data(4, 2, 70), Graph()
    g.outputs = [g.fft(g.input("x", ["rows", 2, 140])), g.fft(g.input("y", [4, 2, 140]))]
    for result in run(g, Device.CPU, x=blocks(x), y=blocks(x)):
        assert result.shape == (4, 2, 140)
        assert error(joined(result), np.fft.fft(x)) < 1e-6


def test_a_transform_of_no_rows_is_empty() -> None:
    """A dimension of size 0 gives an empty result of the same shape."""
    g = Graph()
    g.outputs = [g.fft(g.input("x", [0, 140]))]
    assert run(g, Device.CPU, x=np.empty((0, 140), np.float32))[0].shape == (0, 140)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_fft_axis_transforms_one_axis_of_a_complex_tensor(axis: int) -> None:
    """The blocks stay on the last axis whichever axis is transformed."""
    x, g = complex_data(3, 4, 5), Graph()
    g.outputs = [g.fft_axis(g.input("x", [3, 4, 10]), axis)]
    assert error(joined(run(g, Device.CPU, x=blocks(x))[0]), np.fft.fft(x, axis=axis)) < 1e-6


def test_fftn_and_ifftn_undo_each_other() -> None:
    """Over all axes, and back with the scaling of forward."""
    x, g = complex_data(3, 4, 5), Graph()
    there = g.fftn(g.input("x", [3, 4, 10]))
    g.outputs = [there, g.ifftn(there, norm="forward"), g.fftn(g.input("y", [3, 4, 10]), [0, 1])]
    spectrum, back, partly = run(g, Device.CPU, x=blocks(x), y=blocks(x))
    assert error(joined(spectrum), np.fft.fftn(x)) < 1e-6
    assert error(joined(back), x) < 1e-6
    assert error(joined(partly), np.fft.fftn(x, axes=(0, 1))) < 1e-6


def test_fft_real_adds_zeros_up_to_a_power_of_two() -> None:
    """Six numbers are transformed as eight."""
    x, g = complex_data(2, 6).real, Graph()
    g.outputs = list(g.fft_real(g.input("x", [2, 6])))
    re, im = run(g, Device.CPU, x=x.astype(np.float32))
    assert error(re + 1j * im, np.fft.fft(x, 8)) < 1e-6


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_rfft_and_irfft_are_a_pair(size: int) -> None:
    """Rfft gives numpy's elements; irfft gives n times the numbers, or the numbers with norm forward."""
    x, g = complex_data(2, size).real, Graph()
    re, im = g.rfft(g.input("x", [2, size]))
    g.outputs = [re, im, g.irfft(re, im, size), g.irfft(re, im, size, "forward")]
    left, right, unscaled, back = run(g, Device.CPU, x=x.astype(np.float32))
    assert error(left + 1j * right, np.fft.rfft(x)) < 1e-6
    assert error(unscaled, x * size) < 1e-6
    assert error(back, x) < 1e-6


def test_stft_transforms_frames_under_a_window(device: Device) -> None:
    """Each hop gives one windowed frame; what is left at the end is no frame."""
    x, window, g = complex_data(2, 20).real, np.hanning(8), Graph()
    g.outputs = list(g.stft(g.input("x", [2, 20]), 8, 3, window.astype(np.float32)))
    re, im = run(g, device, x=x.astype(np.float32))
    frames = np.stack([x[:, start : start + 8] * window for start in (0, 3, 6, 9, 12)], 1)
    assert re.shape == (2, 5, 5)
    assert error(re + 1j * im, np.fft.rfft(frames)) < 1e-6


@pytest.mark.parametrize(("length", "taps"), [(1, 1), (10, 3), (13, 4)])
def test_fft_conv1d_is_the_whole_convolution(length: int, taps: int) -> None:
    """T + K - 1 numbers, as numpy's full convolution."""
    x, kernel, g = complex_data(2, length).real, complex_data(taps).real, Graph()
    g.outputs = [g.fft_conv1d(g.input("x", [2, length]), g.input("k", [taps]))]
    (result,) = run(g, Device.CPU, x=x.astype(np.float32), k=kernel.astype(np.float32))
    assert error(result, np.stack([np.convolve(row, kernel) for row in x])) < 1e-5


def test_psd_is_the_power_of_each_element() -> None:
    """re^2 + im^2, of a given transform and of real numbers."""
    x, g = complex_data(2, 8), Graph()
    re, im = g.input("re", [2, 8]), g.input("im", [2, 8])
    g.outputs = [g.psd(re, im), g.psd_real(re)]
    given, real = run(g, Device.CPU, re=x.real.astype(np.float32), im=x.imag.astype(np.float32))
    assert error(given, np.abs(x) ** 2) < 1e-6
    assert error(real, np.abs(np.fft.fft(x.real)) ** 2) < 1e-5


def test_complex_pairs_have_a_norm_and_a_conjugate(device: Device) -> None:
    """Complex numbers as (..., 2)."""
    x, g = complex_data(3, 4), Graph()
    value = g.input("x", [3, 4, 2])
    g.outputs = [g.complex_norm_sq(value), g.conjugate(value)]
    norm, conjugate = run(g, device, x=np.stack([x.real, x.imag], -1).astype(np.float32))
    assert error(norm, np.abs(x) ** 2) < 1e-6
    assert error(conjugate[..., 0] + 1j * conjugate[..., 1], x.conj()) < 1e-6
