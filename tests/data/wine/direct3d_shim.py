"""Answer ID3D12Device5::EnumerateMetaCommands with none, and CreateSharedHandle with an event.

DirectML asks for both, and Wine's vkd3d has neither. The tests and cases whose shaders vkd3d refuses, since they are
written in DXIL and it reads older ones only, are listed in a file.
"""

import ctypes
import os
import uuid
from ctypes import POINTER, WINFUNCTYPE, byref, c_long, c_uint, c_void_p, cast
from pathlib import Path

_kept = []


class _Pipeline(ctypes.Structure):
    _fields_ = [("root", c_void_p), ("shader", c_void_p), ("bytes", ctypes.c_size_t)]


def install():
    device, old = c_void_p(), c_uint()
    iid = (ctypes.c_byte * 16).from_buffer_copy(uuid.UUID("189819f1-1db6-4b57-be54-1821339b85f7").bytes_le)
    code = ctypes.WinDLL("d3d12").D3D12CreateDevice(None, 0xB000, iid, byref(device))
    if code:
        raise OSError(f"D3D12CreateDevice: {code & 0xFFFFFFFF:#x}")
    table = cast(cast(device, POINTER(c_void_p))[0], POINTER(c_void_p))
    kernel = ctypes.WinDLL("kernel32")
    kernel.CreateEventW.restype = c_void_p

    @WINFUNCTYPE(c_long, c_void_p, POINTER(c_uint), c_void_p)
    def enumerate_meta_commands(this, count, descriptions):
        count[0] = 0
        return 0

    make_pipeline = WINFUNCTYPE(c_long, c_void_p, POINTER(_Pipeline), c_void_p, c_void_p)
    compute = make_pipeline(table[11])

    @make_pipeline
    def create_compute_pipeline_state(this, description, interface, state):
        code = compute(this, description, interface, state)
        if code and b"DXIL" in ctypes.string_at(description[0].shader, description[0].bytes):
            with Path(r"C:\rlx\out\dxil.log").open("a", encoding="utf-8") as file:
                test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
                file.write(os.environ.get("CURRENT_CASE", test) + "\n")
        return code

    @WINFUNCTYPE(c_long, c_void_p, c_void_p, c_void_p, c_uint, c_void_p, POINTER(c_void_p))
    def create_shared_handle(this, object_, attributes, access, name, handle):
        handle[0] = kernel.CreateEventW(None, 1, 0, None)
        return 0

    replaced = ((59, enumerate_meta_commands), (31, create_shared_handle), (11, create_compute_pipeline_state))
    for index, function in replaced:
        place = ctypes.addressof(table.contents) + 8 * index
        kernel.VirtualProtect(c_void_p(place), ctypes.c_size_t(8), 4, byref(old))
        ctypes.c_uint64.from_address(place).value = cast(function, c_void_p).value
    _kept.extend([device, compute, *replaced])
