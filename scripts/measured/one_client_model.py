import numpy as np
from rlx_ort import Graph, save_onnx
g = Graph("emb")
x = g.input("ids", ["batch", 128], "i64")
t = g.constant(np.random.default_rng(0).standard_normal((1000, 768)).astype(np.float32))
g.outputs = [g.gather(t, x, axis=0)]
save_onnx(g, "emb.onnx")
