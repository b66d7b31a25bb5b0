// Lets the search of the site work when its pages are opened as files.
//
// Browsers start no worker from a file. This class runs the worker's script in a hidden frame
// instead, and hands each message over as an event, as a worker does.
(() => {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inside.importScripts = (...scripts) =>
        scripts.reduce(
          (before, source) => before.then(() => FrameWorker.load(inside, source)),
          Promise.resolve(),
        );
      this.ready = FrameWorker.load(inside, url);
    }

    static load(inside, source) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const event = new MessageEvent("message", { data });
        this.frame.contentWindow.dispatchEvent(event);
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  if (location.protocol === "file:") {
    window.Worker = FrameWorker;
  }
})();
