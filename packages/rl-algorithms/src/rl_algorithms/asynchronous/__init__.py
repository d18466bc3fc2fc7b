"""The schedule of asynchronous training: a state machine without clocks or threads.

Generators sample answers for later steps while the trainer works on an earlier one.
Every decision is made here, on plain data: which worker samples which answer, which
groups go to which optimizer step, when weights are loaded, which answers are too old,
and how to recover from a failure. A driver (the process that owns the workers) passes
each event to `Schedule.on(event)` and carries out the actions that it returns.

```
 data order          generators         environments        trainer
 ----------          ----------         ------------        -------
     │ admit           Sample              Score              Train
     ▼                   │                   │                  │
 [unsent] ─────────> [sampling] ─> [sampled] ─> [scoring] ─> [scored]     an answer
     ▲    room, newest   │             ▲            │           │
     │    weights        │             └────────────┤ environment died
     └───────────────────┴──────────────────────────┘           │
       failed, overdue; at most max_attempts                     │
                                                                 ▼
 all answers scored ─> [finished] ─> [in training] ─> trained   a group
                           │               │
                dropped (reported)    trainer died: back to the checkpoint

 [starting] ─> [ready] ─> [resting] ─> [starting] ...            a worker
                  └──> [retired]     too many failures in a row

 published ─> sent ─> confirmed ─> sampled with                  a weight version
```

```
part            consumes      produces         waits for            is unblocked by
──────────────  ────────────  ───────────────  ───────────────────  ────────────────
prompt order    room          groups           StalenessRule.fits,  a step trained,
                                               group_limit          a group dropped
generator       Sample        Answered         newest weights,      WeightsLoaded,
                                               a free place         Answered, Cancel
weight version  StepTrained   LoadWeights      no answer in flight  Answered, Cancel
                                               (between answers)
environment     Score         Scored           a sampled answer,    Answered,
                                               a free place         Scored, Cancel
trainer         finished      StepTrained      a full step, groups  a group finished
                groups                         that must be in it   or dropped
checkpoint      StepTrained   CheckpointSaved  an idle trainer      StepTrained
failed worker   WorkerFailed  StartWorker      its backoff          Tick
driver          actions       events           workers, deadlines   next_deadline_s
```

Each wait has a deadline, so nothing above can wait forever: an answer, a score, a
weight load, a step, a checkpoint, a start and, above them all, the progress of the run.
Start reading at `rl_algorithms.asynchronous.schedule`.

Steps are numbered from 0, and a weight version is a number of steps: version n is the
weights after n steps, and step n turns version n into version n + 1. The age of an
answer in step n is n minus the version that sampled its oldest token, as in
`rl_algorithms.rollout.versions`.
"""
