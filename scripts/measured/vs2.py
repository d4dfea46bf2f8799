"""rates of served() in simulated time: vs2.py LANE(joined|fine|never)"""
import os, sys, collections
T=os.getcwd(); sys.path[:0]=[T, T+"/tests/unit/serving", T+"/tests/helpers", T+"/tests"]
import test_several_devices as M
from types import SimpleNamespace
L=M.lane_module; S=M.scheduling
mode=sys.argv[1]
FINE=[1,2,4,8,16,24,32,48,64,96,128,192,256]
if mode=="fine":
    L.Lane._padded=lambda self,rows: max(min(next((n for n in FINE if n>=rows),rows),self._most),rows)
    def taken(self, rows):
        padded=self._padded(rows)
        if self.padding=="never" or rows==padded: return rows
        fewer=max(n for n in FINE if n<rows)
        return rows if fewer*self.expected_ns(padded) <= rows*self.expected_ns(fewer) else fewer
    L.Lane.taken=taken
tot=[]
for name,cost in (("distilbert",M.gpu(.55e6,.302e6)),("resnet",M.gpu(1.81e6,.334e6)),("ours",M.gpu(1e6,6e4))):
    for n in (32,64,128):
        for think,spread in ((2e6,1e6),(5e6,2e6),(8e6,3e6),(8e6,0),(10e6,1e6)):
            clock=M.Clock()
            for m in (S,L): m.time=SimpleNamespace(perf_counter_ns=lambda: clock.ns)
            runs=collections.Counter()
            def c(r): runs[r]+=1; return cost(r)
            rate=M.served(clock,{M.CUDA:c},n,host_ns=90_000,think_ns=think,spread_ns=spread,padding="never" if mode=="never" else "joined",seconds=2,predicted=lambda d,r:cost(r))[0]
            best=min(64,n); tot.append(rate)
            if n==64: print(mode,name,n,think/1e6,spread/1e6,"rate",round(rate),"of halves",round(rate/(32/cost(32)*1e9),3),"runs",sorted(runs.items())[-6:] )
import math
print(mode,"geo",math.exp(sum(map(math.log,tot))/len(tot)), [round(t) for t in tot])
