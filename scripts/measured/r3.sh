. /tmp/gpug/part.sh
(LEFT=60 timeout 215 bash /tmp/gpug/t1.sh)
echo "$(date +%s) begin2" > /tmp/g/done
(part 1 0-9 6 models models=200) &
(part 0 10-25 16 generated generated=150) &
(CUDA_VISIBLE_DEVICES=0 taskset -c 26-31 timeout 170 python3 /tmp/gpug/prof_unet.py detr 16 > /tmp/r/detr.log 2>&1) &
until_done 205 3; sleep 1; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/models.log /tmp/g/generated.log | cut -c1-300; tail -3 /tmp/r/detr.log | cut -c1-300
