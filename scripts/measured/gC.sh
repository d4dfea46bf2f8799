. /tmp/gpug/part.sh
for h in heuristic ours heuristic ours one ours; do timeout 60 python3 /tmp/gpug/ocr.py /tmp/r/ocr.jsonl /tmp/m/ocr.onnx cuda $h > /tmp/r/ocr-$h.log 2>&1; done
cat /tmp/r/ocr.jsonl
for m in "distilbert batch=1,seq=128" "resnet50 batch=1"; do set -- $m; WINDOWS="64:6,64:4,64:4,1:3" timeout 100 python3 /tmp/gpug/sv.py /tmp/r/sv-$1.jsonl /tmp/m/$1.onnx $2 0-9 10-15 > /tmp/r/sv-$1.log 2>&1; timeout 60 python3 /tmp/gpug/floor.py /tmp/r/floor.jsonl /tmp/m/$1.onnx $2 > /tmp/r/floor.log 2>&1; cut -c1-330 /tmp/r/sv-$1.jsonl; done
cat /tmp/r/floor.jsonl; ship
