"""TensorRT and TensorRT for RTX: compilers for NVIDIA GPUs that build an engine per model, in seconds to minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import install_command
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.cuda import CudaProvider, NvidiaProvider, cuda_libraries_problem, cuda_options
from rlx_ort.providers.engine.cuda_driver import apart, wait_for
from rlx_ort.providers.engine.recipe import SessionRecipe, names
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.hardware import nvidia_gpus
from rlx_ort.storage import cache_folder


class _NvidiaCompiler(NvidiaProvider):
    """The base of both compilers."""

    compiles: ClassVar[bool] = True
    compiles_per_shape: ClassVar[bool] = True

    def devices(self) -> Sequence[Device]:
        """Return one device for each GPU of the driver, or index 0 when it lists none."""
        return tuple(Device(self.kinds[0], index) for index in range(max(1, len(nvidia_gpus()))))

    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "CUDA's transfers as on an H200, rates assumed",
        gflops=(14_000, 12_000),
        bytes_per_ns=(900, 11),
        ns=(3_000, 40_000),
    )


class TensorRtProvider(_NvidiaCompiler):
    """TensorRT; the index is CUDA's device ordinal."""

    name: ClassVar[str] = "tensorrt"
    kinds: ClassVar[tuple[str, ...]] = ("tensorrt",)
    ep_name: ClassVar[str] = "TensorrtExecutionProvider"
    title: ClassVar[str] = "TensorRT"
    remedy: ClassVar[str] = install_command("cuda", "tensorrt")
    # https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html#configurations
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        device_id has_user_compute_stream user_compute_stream trt_max_workspace_size trt_max_partition_iterations
        trt_min_subgraph_size trt_fp16_enable trt_bf16_enable trt_int8_enable trt_int8_calibration_table_name
        trt_int8_use_native_calibration_table trt_dla_enable trt_dla_core trt_engine_cache_enable
        trt_engine_cache_path trt_engine_cache_prefix trt_timing_cache_enable trt_timing_cache_path
        trt_force_timing_cache trt_engine_decryption_enable trt_engine_decryption_lib_path
        trt_engine_hw_compatible trt_dump_ep_context_model trt_ep_context_file_path trt_ep_context_embed_mode
        trt_weight_stripped_engine_enable trt_onnx_model_folder_path trt_profile_min_shapes
        trt_profile_max_shapes trt_profile_opt_shapes trt_cuda_graph_enable trt_context_memory_sharing_enable
        trt_layer_norm_fp32_fallback trt_builder_optimization_level trt_auxiliary_streams trt_tactic_sources
        trt_extra_plugin_lib_paths trt_build_heuristics_enable trt_sparsity_enable
        trt_force_sequential_engine_build trt_detailed_build_log trt_dump_subgraphs trt_op_types_to_exclude
        trt_preview_features trt_load_user_initializer trt_external_data_bytestream
        trt_external_data_bytestream_size trt_onnx_bytestream trt_onnx_bytestream_size
        """
    )

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return the TensorRT and CUDA libraries that are not found, all of them."""
        return cuda_libraries_problem("onnxruntime_providers_tensorrt")

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe with CUDA behind it, which takes the nodes that TensorRT leaves."""
        helpers = ((CudaProvider.ep_name, cuda_options(device.index, options.precision)),)
        return replace(
            super().recipe(device, options),
            helpers=helpers,
            wait=partial(wait_for, device.index),
            apart=apart.other,
            cache_options=lambda folder: {"trt_engine_cache_enable": "1", "trt_engine_cache_path": folder},
        )

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return options for one GPU; half precision only where it was asked for."""
        return {
            "device_id": str(device.index),
            "trt_fp16_enable": str(int(options.precision is Precision.F16)),
            "trt_bf16_enable": str(int(options.precision is Precision.BF16)),
            # Timed kernels need not be timed again. The engine cache is off but in the compile cache's folder
            # of one model: its own key does not hold the weights, so a changed parameter would get the old engine.
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": str(cache_folder("tensorrt")),
        }

    # TensorRT has no option against TF32: on Ampere and newer, NVIDIA_TF32_OVERRIDE=0 in the environment turns it off.


class TensorRtRtxProvider(_NvidiaCompiler):
    """TensorRT for RTX: a smaller compiler for GPUs from Ampere on, by plugin."""

    name: ClassVar[str] = "nv-tensorrt-rtx"
    kinds: ClassVar[tuple[str, ...]] = ("nv-tensorrt-rtx",)
    ep_name: ClassVar[str] = "NvTensorRTRTXExecutionProvider"
    title: ClassVar[str] = "TensorRT RTX"
    remedy: ClassVar[str] = "pip install onnxruntime-ep-nv-tensorrt-rtx-cu13  # driver 555.85 or newer"
    plugin: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/TensorRTRTX-ExecutionProvider.html#execution-provider-options
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        device_id has_user_compute_stream user_compute_stream enable_cuda_graph nv_max_workspace_size
        nv_max_shared_mem_size nv_profile_min_shapes nv_profile_max_shapes nv_profile_opt_shapes
        nv_multi_profile_enable nv_runtime_cache_path
        """
    )

    cache_option: ClassVar[str] = "nv_runtime_cache_path"

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return the folder of compiled kernels, which do not depend on weights."""
        return {self.cache_option: str(cache_folder("tensorrt-rtx"))}
