import sys, time, socket, json, statistics, subprocess, urllib.request, numpy as np, os
N=int(sys.argv[1]) if len(sys.argv)>1 else 3000
with socket.socket() as s: s.bind(("127.0.0.1",0)); port=s.getsockname()[1]
srv=subprocess.Popen([sys.executable,"-P","-m","rlx_ort.cli" if 0 else "-c","import sys; sys.path.insert(0,'.'); from rlx_ort.cli import main; main()"] [:1]+["-P","-c","from rlx_ort.cli import main; main()","serve","emb.onnx","--grpc","-1","--http-port",str(port),*sys.argv[2:]],stdout=open("srv.log","w"),stderr=subprocess.STDOUT)
try:
    while True:
        try:
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready",timeout=2).status==200: break
        except Exception: time.sleep(0.2)
    a=np.ones((1,128),np.int64); head=json.dumps({"inputs":[{"name":"ids","shape":[1,128],"datatype":"INT64","parameters":{"binary_data_size":a.nbytes}}],"parameters":{"binary_data_output":True}}).encode(); b=head+a.tobytes()
    data="\r\n".join(["POST /v2/models/emb/infer HTTP/1.1",f"Host: 127.0.0.1:{port}",f"Inference-Header-Content-Length: {len(head)}",f"Content-Length: {len(b)}","",""]).encode()+b
    s=socket.create_connection(("127.0.0.1",port)); s.setsockopt(socket.IPPROTO_TCP,socket.TCP_NODELAY,1); lat=[]; import collections; needs=collections.Counter(); heads=set(); buf=bytearray(1<<21); v=memoryview(buf)
    for _ in range(N):
        t=time.perf_counter(); s.sendall(data); got=0; need=None
        while need is None or got<need:
            got+=s.recv_into(v[got:])
            if need is None and (i:=buf.find(b"\r\n\r\n",0,got))>=0:
                need=i+4+int(bytes(buf[:i]).lower().split(b"\ncontent-length:")[1].split(b"\r\n")[0])
            needs[need]+=1; heads.add(bytes(buf[:220]))
        lat.append((time.perf_counter()-t)*1e3)
    m=urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    for l in m.splitlines():
        if l.startswith(("rlx_inference_compute","rlx_inference_queue_duration_us","rlx_inference_request_duration_us","rlx_inference_exec")): print(l)
    print("p50",statistics.median(lat[200:]),"p90",np.percentile(lat[200:],90), needs, [h for h in heads][:4], got)
finally:
    srv.terminate(); srv.wait(20)
