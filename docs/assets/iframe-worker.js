/* Browsers start no worker from a file on disk. On such pages, run the theme's search worker in a hidden frame instead.
   The theme detects this by the name IFrameWorker. mkdocs.yml loads this file before the theme's scripts. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const isLoaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      document.body.append(this.frame);
      this.ready = isLoaded.then(() => {
        const scope = this.frame.contentWindow;
        scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        scope.importScripts = async (...urls) => {
          for (const script of urls) await this.run(script);
        };
        return this.run(url);
      });
    }

    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const scope = this.frame.contentWindow;
        scope.dispatchEvent(new scope.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
