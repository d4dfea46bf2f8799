import os, sys, collections
T="."; sys.path[:0]=[T, T+"/tests/unit/serving", T+"/tests/helpers", T+"/tests"]
import test_several_devices as M
from types import SimpleNamespace
L=M.lane_module; S=M.scheduling
import math, random
JIT=float(os.environ.get('JIT','0'))
PT={1:.86e6,2:1.5e6,4:3.1e6,8:3.7e6,16:5.7e6,32:10.3e6,64:20.3e6,128:40.6e6,256:81e6}
def distil(r):
    n=1<<(r-1).bit_length(); return PT[n]
RT={1:2.45e6,2:3.0e6,4:3.6e6,8:5.1e6,16:7.4e6,32:12.9e6,64:25.0e6,128:48e6,256:92e6}
def resnet(r): return RT[1<<(r-1).bit_length()]
def go(label):
    tot=[]
    for name,cost in (("distil",distil),("resnet",resnet)):
        for n in (64,128):
            for think,spread,host in ((2e6,1e6,90_000),(5e6,1e6,60_000),(5e6,2e6,90_000),(8e6,3e6,90_000),(5e6,5e6,130_000),(10e6,1e6,60_000)):
                clock=M.Clock()
                for m in (S,L): m.time=SimpleNamespace(perf_counter_ns=lambda: clock.ns)
                runs=collections.Counter()
                rnd=random.Random(5)
                def c(r): runs[r]+=1; return cost(r)*(1+rnd.random()*JIT)
                rate=M.served(clock,{M.CUDA:c},n,host_ns=host,think_ns=think,spread_ns=spread,padding="joined",seconds=2,predicted=lambda d,r:cost(r))[0]
                tot.append(rate)
                if n==64: print(label,name,n,think/1e6,spread/1e6,host,"rate",round(rate),"of halves",round(rate/(32/cost(32)/(1+JIT/2)*1e9),3),"runs",sorted(runs.items()))
    print(label,"geo",math.exp(sum(map(math.log,tot))/len(tot)), [round(t) for t in tot])
if __name__=="__main__": go("now")
