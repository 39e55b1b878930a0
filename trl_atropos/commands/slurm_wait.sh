# A signal ends `wait`, not the run.
CODE=0
while wait "$RUN" || CODE=$?; kill -0 "$RUN" 2> /dev/null; do CODE=0; done
exit "$CODE"
