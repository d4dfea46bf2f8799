[ -f /tmp/gpu-env.sh ] || exit 9
. /tmp/gpu-env.sh; mkdir -p /tmp/r; END=$(( $(date +%s) + $1 ))
one() { local n=0; while [ $(( $(date +%s) + 12 )) -lt $END ]; do n=$((n+1)); RLX_CACHE_DIR=/tmp/c$1 timeout $(( END - $(date +%s) )) python3 -P /tmp/gpug/stress.py $(( END - $(date +%s) - 8 )) $2 $((n*100+$1)) > /tmp/r/st-$2-$1-$n.log 2>&1; echo "$2 $1 rc $?" >> /tmp/r/rc.txt; done; }
for s in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do one $s $( [ $s -le 9 ] && echo none || echo both ) & done; wait
tar czf $OUT/st.tgz -C /tmp r; sort /tmp/r/rc.txt | cut -d' ' -f1,3,4 | sort | uniq -c
for f in $(grep -l NATIVE /tmp/r/st-*.log | head -3); do sed -n '/NATIVE/,/Fatal/p' $f | cut -c1-160 | head -40; done
tail -qn1 /tmp/r/st-*.log | grep how | head -20
