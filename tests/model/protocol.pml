/* The protocols of gemma_py/runtime/sync.py and team.py for the model checker spin, under sequential consistency.

   With BARRIERS, each of N workers writes, passes a barrier, reads what another worker wrote, passes a barrier and writes again.
   Otherwise, the workers claim tiles of rows, publish the rows in order, and claim queries, which await rows. protocol.py sets
   these macros:
     N           the number of workers
     FAULT_FAIL  any worker may fail at any call; FAULT_STALL: any worker may stop at any call, until the run has been broken;
     LEAVE       worker 0 leaves without arriving at the first barrier
     WATCH       the team looks for deadlocks, as _Watch.tick does
     M_...       a mutation, which the checker must find

   break_run models `fail` in sync.py. break_run in team.py checks and stores in two steps, not atomically. This is harmless,
   because the thread that calls it then raises an error, whichever worker is named in `broken`.

   A loop that polls a cell is modelled as one blocking condition. If no worker can continue, spin reports an invalid end
   state. */

#ifndef N
#define N 2
#endif
#if N == 2
#define TILES 3   /* more tiles than workers, so that workers may wait for a tile that is not claimed yet */
#else
#define TILES N
#endif

byte broken, arrived, generation, counter, queries, mark;          /* the cells of one run */
byte step[N], waiting[N], bound[N];                                /* one of each for every worker */
byte data[N], row[TILES], owners[TILES];                           /* plain arrays */
bool gone[N], stalled[N], late;
byte failures, outcomes, blamed, finished;                         /* blamed: the first value of `broken` */
#define AT_BARRIER 1
#define FOR_MARK 2
#define awaited(w) (waiting[w] == AT_BARRIER -> generation : mark)

#ifdef WATCH
#define ADVANCE step[w]++
#else
#define ADVANCE skip
#endif

#ifdef M_WAIT_IGNORES_BROKEN
#define CAN_END(cell, limit) (cell > limit)
#else
#define CAN_END(cell, limit) (cell > limit || broken)
#endif

inline break_run(who) {
#ifdef M_FAIL_NOT_ATOMIC
  if :: broken == 0 -> broken = who + 1 :: else fi;
#else
  atomic { if :: broken == 0 -> broken = who + 1 :: else fi };
#endif
  if :: blamed == 0 -> blamed = broken :: else fi;
  assert(blamed == broken)                                         /* `broken` keeps the first worker that failed */
}

/* A call of sync.py, at which a worker may fail or stop. */
inline call() {
  skip;
#ifdef FAULT_FAIL
  if
  :: atomic { failures < 2 -> failures++ }; break_run(w); goto leave
  :: true
  fi
#endif
#ifdef FAULT_STALL
  if
  :: atomic { failures < 1 -> failures++; stalled[w] = true }; (late); stalled[w] = false
  :: true
  fi
#endif
}

inline wait_above(cell, limit, why) {
  if
  :: cell > limit
  :: else ->
     bound[w] = limit; waiting[w] = why;
     CAN_END(cell, limit);
     if :: cell > limit :: else -> goto leave fi;
     waiting[w] = 0
  fi;
  ADVANCE;
  if :: broken -> goto leave :: else fi
}

inline barrier(phase) {
  call();
#ifndef M_GENERATION_AFTER_ARRIVAL
  seen = generation;
#endif
#ifdef M_ARRIVAL_NOT_ATOMIC
  before = arrived; arrived = before + 1;
#else
  atomic { before = arrived; arrived = before + 1 };
#endif
#ifdef M_GENERATION_AFTER_ARRIVAL
  seen = generation;
#endif
  if
  :: before == N - 1 ->
#ifdef M_RESET_AFTER_GENERATION
     generation = seen + 1; arrived = 0;
#else
     arrived = 0; generation = seen + 1;
#endif
     ADVANCE;
     if :: broken -> goto leave :: else fi
  :: else ->
#ifdef M_NO_BARRIER_WAIT
     skip
#else
     wait_above(generation, seen, AT_BARRIER)
#endif
  fi
}

inline claim(cell) {
  call();
  if :: broken -> tile = TILES :: else ->
#ifdef M_CLAIM_NOT_ATOMIC
     tile = cell; cell = tile + 1;
#else
     atomic { tile = cell; cell = tile + 1 };
#endif
     if :: tile < TILES -> ADVANCE :: else fi
  fi
}

inline publish() {
  call();
#ifndef M_NO_PUBLISH_WAIT
  if
  :: tile > 0 -> wait_above(mark, tile - 1, FOR_MARK)
  :: else -> ADVANCE
  fi;
#endif
  assert(mark == tile || broken);                                  /* no other worker owns this tile */
  mark = tile + 1
}

proctype worker(byte w) {
  byte seen, before, tile, i;
#ifdef LEAVE
  if :: w == 0 -> goto leave :: else fi;
#endif
#ifdef WATCH
  tile = w; row[tile] = 1; publish(); barrier(0);                     /* no step between publication and wait */
#else
#ifdef BARRIERS
  data[w] = 1;
  barrier(0);
  i = (w + 1) % N; assert(data[i] == 1); i = 0;
  barrier(1);
  data[w] = 2;
#else
  claim(counter);
  do
  :: tile < TILES ->
#ifdef M_CLAIM_DESCENDING
     tile = TILES - 1 - tile;
#endif
     owners[tile]++;
     assert(owners[tile] == 1);
#ifdef M_PUBLISH_BEFORE_WRITE
     publish(); row[tile] = 1;
#else
     row[tile] = 1; publish();
#endif
     claim(counter)
  :: else -> break
  od;
  claim(queries);
  do
  :: tile < TILES ->
     call();
#ifndef M_NO_AWAIT
     wait_above(mark, tile, FOR_MARK);
#endif
     d_step { for (i : 0 .. tile) { assert(row[i] == 1) }; i = 0 };
     claim(queries)
  :: else -> break
  od;
#endif
#endif
  if :: broken == 0 -> finished++ :: else fi;
leave:
  atomic { gone[w] = true; outcomes++ }
}

/* The calling thread: it reports a stall by breaking the run, and waits until every worker has left. */
proctype team() {
  byte w = 0;
#ifdef FAULT_STALL
  do
  :: outcomes == N -> break
#ifndef M_STALL_NOT_REPORTED
  :: w < N && stalled[w] -> break_run(w); break
#endif
  :: w < N && !stalled[w] && outcomes < N -> w = (w + 1) % N
  od;
  (outcomes >= N - failures || outcomes == N);                     /* the other workers leave before the stalled one continues */
  assert(failures == 0 || broken);
  late = true;
#endif
#ifdef WATCH
  byte quiet = 0, old[N], now, limit;
  bool resting, moved, genuine;
  do
  :: outcomes == N -> break
  :: outcomes < N ->
     resting = true; moved = false;
     for (w : 0 .. N - 1) {
       if
       :: gone[w]
       :: !gone[w] && !waiting[w] -> resting = false
       :: else ->
#ifndef M_WAITING_ALONE_IS_DEADLOCK
          limit = bound[w];
          if :: awaited(w) > limit -> resting = false :: else fi;
          limit = 0
#else
          skip
#endif
       fi
     };
     for (w : 0 .. N - 1) { now = step[w]; if :: now != old[w] -> moved = true; old[w] = now :: else fi };
     if :: resting && !moved -> quiet++ :: else -> quiet = 0 fi;
#ifdef M_ONE_QUIET_TICK
     if :: quiet == 1 ->
#else
     if :: quiet == 2 ->
#endif
        d_step {
          genuine = true;
          for (w : 0 .. N - 1) { if :: gone[w] || (waiting[w] && awaited(w) <= bound[w]) :: else -> genuine = false fi };
          assert(genuine)
        };
        broken = 1;                                                /* report the deadlock */
        break
     :: else fi
  od;
#endif
  (outcomes == N);                                                 /* every worker leaves */
#if !defined(FAULT_FAIL) && !defined(FAULT_STALL) && !defined(LEAVE)
  assert(finished == N && broken == 0);
#else
  assert(broken || finished == N)
#endif
}

init { byte w; atomic { for (w : 0 .. N - 1) { run worker(w) }; run team() } }
