// The search of a site that is opened from a disk: browsers start no worker from a file, so that the worker's script
// runs in a hidden frame instead, and messages go there and back as they would to a worker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      const waiting = [];
      const frame = document.createElement("iframe");
      this.postMessage = data => {
        if (waiting.ready) frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
        else waiting.push(data);
      };
      this.terminate = () => frame.remove();
      frame.hidden = true;
      frame.srcdoc = `<!doctype html><title>search</title><script src="${new URL(script, location.href)}"></script>`;
      frame.addEventListener("load", () => {
        frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
        waiting.ready = true;
        waiting.splice(0).forEach(this.postMessage);
      });
      document.body.append(frame);
    }
  };
  window.Worker = window.IFrameWorker;
}
