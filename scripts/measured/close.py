"""Open, run, close. close.py before|after SECONDS"""
import sys, time
from dataclasses import replace
import numpy as np, onnx
from rlx_ort import CompileOptions, Session, from_onnx
from rlx_ort.providers.cuda import CudaProvider
if sys.argv[1]=="before":
    made=CudaProvider.recipe
    CudaProvider.recipe=lambda self,*a: replace(made(self,*a),wait=None)
text="(float[2,1,3,4] x, float[3,4,4] w) => (y) { a = MatMul (x, w) b, c = Split <axis = 3, num_outputs = 2> (a) y = Concat <axis = 3> (c, b) }"
g=from_onnx(onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g '+text))
f={"x":np.ones((2,1,3,4),np.float32),"w":np.ones((3,4,4),np.float32)}
end=time.time()+float(sys.argv[2]); n=0
while time.time()<end:
    c=Session("cuda",CompileOptions(device_graph=False)).compile(g); c.run(f); c.close(); n+=1
    if n%20==0: print(n,flush=True)
print("ended",n)
