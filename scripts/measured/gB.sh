. /tmp/gpug/part.sh
(part 0 0-3 4 webgpu webgpu=190; part 0 0-3 4 figures figures=120; part 0 0-1 1 calibration calibration=140) &
(part 0 4-7 4 truth truth=190; part 0 4-7 4 generated generated=150) &
(taskset -c 8-9 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m ocr resnet50 distilbert bert minilm vit whisper > /tmp/r/fill.log 2>&1
 for s in 1 2 3; do RLX_CACHE_DIR=/tmp/cg$s taskset -c 10-12 timeout 280 python3 scripts/generate_cases.py --device cuda --minutes 4 --first $((s*1000003+700)) --failures /tmp/r/fail$s.json > /tmp/r/gen$s.log 2>&1 & done
 for b in 1 16; do RLX_CACHE_DIR=/tmp/cm taskset -c 13-15 timeout 120 python3 scripts/memory_budget.py --device cuda --count /tmp/m/bert.onnx /tmp/m/distilbert.onnx /tmp/m/minilm.onnx --dim batch=$b seq=128 >> /tmp/r/count.txt 2>&1; RLX_CACHE_DIR=/tmp/cm taskset -c 13-15 timeout 120 python3 scripts/memory_budget.py --device cuda --count /tmp/m/resnet50.onnx /tmp/m/vit.onnx /tmp/m/whisper.onnx --dim batch=$b >> /tmp/r/count.txt 2>&1; done; wait) &
until_done 400 8; pkill -f /gpu_gate.py; sleep 1; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300; tail -qn 2 /tmp/r/gen*.log | cut -c1-200; cat /tmp/r/count.txt | cut -c1-200
