import random,sys,time,os,pickle
from tests.ranks import run_ranks
from tests.runtime import layout_workers
from tests.runtime.random_layouts import *
def main():
    n=int(sys.argv[1]);k=int(sys.argv[2]);seed=int(sys.argv[3]) if len(sys.argv)>3 else 0
    rng=random.Random(seed)
    t=time.process_time()
    ws=[]; it=draw_worlds(n,rng)
    while len(ws)<k: ws.append(next(it))
    print("draw",time.process_time()-t)
    t=time.process_time()
    torch.set_num_threads(1)
    tr=[train_alone(w) for w in ws]
    print("alone",time.process_time()-t, min(x.margin for x in tr))
    if os.environ.get("V"):
        for w in ws: print(w.layout, w.shape.num_layers)
    t=time.time()
    r=run_ranks(layout_workers.layouts_train_alike,n,pickle.dumps(list(zip(ws,tr))),timeout_seconds=int(os.environ.get("T","300")))
    print("ranks",time.time()-t)
    for i,x in enumerate(r):
        if x: print(i,x[-3000:]); 
if __name__=="__main__": main()
