// Build the page of the model that is in it.

const MODEL = JSON.parse(element("model").textContent);
const PAGE = new (MODEL.vocabulary.kind === "image" ? PicturePage : TextPage)(
  MODEL,
  element("weights").textContent,
);
element("weights").remove(); // the text of the weights is no longer needed
