import os, sys, collections, random, math
sys.path.insert(0,"/tmp/prof")
import vs3
from vs3 import M,L,S,SimpleNamespace,PT,RT,distil,resnet
JIT=float(os.environ.get("JIT","0.1"))
def go():
    tot=[]
    for name,cost in (("distil",distil),("resnet",resnet)):
        for n in (128,):
            for think,spread,host in ((2e6,1e6,60_000),(4e6,1e6,90_000),(4e6,2e6,150_000),(6e6,3e6,150_000),(5e6,5e6,120_000),(8e6,2e6,180_000)):
                clock=M.Clock()
                for m in (S,L): m.time=SimpleNamespace(perf_counter_ns=lambda: clock.ns)
                runs=collections.Counter(); rnd=random.Random(5)
                def c(r): runs[r]+=1; return cost(r)*(1+rnd.random()*JIT)
                rate=M.served(clock,{M.CUDA:c,M.SECOND:c},n,host_ns=host,think_ns=think,spread_ns=spread,padding="joined",seconds=2,predicted=lambda d,r:cost(r))[0]
                ideal=2*32/(cost(32)*(1+JIT/2))*1e9; ideal=min(ideal,1e9/host)
                tot.append(rate/ideal)
                print(name,n,think/1e6,spread/1e6,host,"rate",round(rate),"of ideal",round(rate/ideal,3),"runs",sorted(runs.items()),flush=True)
    print("geo",math.exp(sum(map(math.log,tot))/len(tot)))
go()
