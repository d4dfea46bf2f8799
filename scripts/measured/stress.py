"""Sessions are opened and others record at the same time. stress.py SECONDS LOCK(none|both|record) SEED"""
import sys, time, threading, faulthandler, os, json
from pathlib import Path
faulthandler.enable()
import ctypes; ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)),'bt.so')).install()
ROOT=Path.cwd(); sys.path[:0]=[str(ROOT)]
import numpy as np
from rlx_ort import Graph, Session, CompileOptions
from rlx_ort.providers.engine import opening, cuda_driver as cd
seconds,how,seed=float(sys.argv[1]),sys.argv[2],int(sys.argv[3])
lock=threading.Lock()
if how in ("both","record"):
    rec=cd._CudaRecorder.record
    def record(self,*a):
        with lock: return rec(self,*a)
    cd._CudaRecorder.record=record
if how=="both":
    cre=opening._create
    def create(*a,**k):
        with lock: return cre(*a,**k)
    opening._create=create
end=time.monotonic()+seconds; n={"open":0,"record":0,"wrong":0,"err":0}
def graph(k):
    g=Graph(f"g{k}"); x=g.input("x",["rows",4]); v=x
    for i in range(k%5): v=v*g.param(f"w{i}",[4],data=np.arange(4,dtype=np.float32))+1.0
    g.outputs=[v.stop_gradient() if k%3==0 and hasattr(v,"stop_gradient") else v if k%5 else v*1.0]; return g
def opener(t):
    k=t
    while time.monotonic()<end:
        k+=1
        try:
            c=Session("cuda",CompileOptions(device_graph=[False,"auto"][k%2])).compile(graph(k)); c.run({"x":np.ones((1+k%3,4),np.float32)}); c.close(); n["open"]+=1
        except Exception as e: n["err"]+=1; print(repr(e)[:200],flush=True) if n["err"]<4 else None
def recorder(t):
    k=t
    while time.monotonic()<end:
        k+=1
        try:
            c=Session("cuda",CompileOptions(device_graph=True)).compile(graph(k)); x=np.random.rand(1+k%4,4).astype(np.float32); first=None
            for _ in range(5):
                y=c.run({"x":x})[0]; first=y if first is None else first
                if not np.array_equal(first,y): n["wrong"]+=1
            c.close(); n["record"]+=1
        except Exception as e: n["err"]+=1; print(repr(e)[:200],flush=True) if n["err"]<4 else None
ts=[threading.Thread(target=f,args=(seed*1000+i*100,)) for i,f in enumerate((opener,opener,recorder,recorder))]
[t.start() for t in ts]; [t.join() for t in ts]
print(json.dumps({"how":how,**n}),flush=True)
