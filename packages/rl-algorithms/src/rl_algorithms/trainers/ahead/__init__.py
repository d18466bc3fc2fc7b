"""Sampling ahead of training: the driver of the schedule in `asynchronous`.

```
trainer (main thread)     controller (thread)       desks (threads)
  next_step <------------- Train
  end_step --------------> Schedule --LoadWeights--> generator --> replicas
                              ^  |----Sample-------> generator --> answers
                              |  |----Score--------> environment -> verdicts
                              +------- events ------------+
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| trainer | groups of a step | `StepTrained`, weights | `Train` | controller, failure |
| controller | events, one at a time | actions | the next event | a desk, a deadline |
| generator desk | rows, weights | answers, a version | a call | deadlines of workers |
| environment desk | answers | verdicts | a call | deadlines of workers |

A trainer holds an `AheadSampler`; the schedule makes all decisions.
"""
