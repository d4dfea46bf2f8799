. /tmp/gpug/part.sh; . /tmp/gpug/sv.sh
mkdir -p /tmp/g
W2=128:8,128:4,128:4
sv two "" $W2 distilbert batch=1,seq=128 "[64]" 0-19 20-31 0,1
sv two "" $W2 resnet50 batch=1 "[64]" 0-19 20-31 0,1
ship
timeout 100 python3 /tmp/gpug/two.py /tmp/r/two.jsonl /tmp/m/minilm.onnx /tmp/m/bert.onnx > /tmp/r/two.log 2>&1; cut -c1-300 /tmp/r/two.log; ship
timeout ${LEFT:-230} python3 /tmp/gpug/two.py /tmp/r/two20.jsonl /tmp/m/minilm.onnx /tmp/m/bert.onnx 20 > /tmp/r/two20.log 2>&1; cut -c1-300 /tmp/r/two20.log
ship
